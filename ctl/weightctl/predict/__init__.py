"""`weightctl predict`: sends one request with inputs from files or random values, and prints or saves the outputs."""
