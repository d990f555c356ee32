"""The number of workers of a model that follows the load."""
