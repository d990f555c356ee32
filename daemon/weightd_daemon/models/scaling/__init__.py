"""Changes the number of workers of a model with its load."""
