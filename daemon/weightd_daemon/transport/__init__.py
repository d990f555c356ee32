"""Transport of the daemon: connections of clients, what is kept for them, and the proxies that speak ZeroMQ."""
