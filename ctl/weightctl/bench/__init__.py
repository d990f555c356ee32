"""`weightctl bench`: how much a model answers, and how soon."""
