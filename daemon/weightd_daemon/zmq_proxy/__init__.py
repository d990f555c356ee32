"""The proxy: a process that speaks ZeroMQ with the clients of one listener.

And weightd's own transport with the daemon.

What ends this process ends the connections of its listener, and nothing else. It passes messages on as they are, each
client's over a pair of sockets of its own, and reads nothing but their lengths. May import `host`, and what all share;
the daemon's side is `weightd_daemon.transport.zmq_proxies`.
"""
