"""The ZeroMQ proxy: a process that speaks ZeroMQ with the clients of one listener and relays messages to the daemon.

A crash of the proxy closes only the connections of its listener. The proxy relays messages unchanged, without decoding
them, over a separate pair of Unix sockets for each client. This package imports only one other package of the daemon,
`platform`. `weightd_daemon.transport.zmq_proxies` is the code in the daemon that manages the proxies.
"""
