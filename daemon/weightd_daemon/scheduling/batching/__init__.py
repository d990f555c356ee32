"""Batching: combines requests in one batch, and splits a request into several batches whose results it joins."""
