"""HTTP and gRPC in front of the daemon: a client of it, in a process of its own."""
