"""Models on demand: requests to more models than fit into memory, cold starts, and the cost of registered models."""
