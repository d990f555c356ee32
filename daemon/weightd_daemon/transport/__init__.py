"""Transport between clients and the daemon: connections, their memory budget, and the ZeroMQ proxies."""
