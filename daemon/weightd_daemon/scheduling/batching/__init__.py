"""Batching: several requests in one batch, one request in several batches, and the joining of results."""
