"""The HTTP and gRPC gateway: a client of the daemon that runs as a separate process."""
