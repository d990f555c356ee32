"""Direct channels: requests go from the client to a worker without the daemon."""
