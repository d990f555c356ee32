"""The ZeroMQ proxy: a process that speaks ZeroMQ with the clients of one listener and relays messages to the daemon.

A crash of the proxy closes the connections of its listener and nothing else. The proxy relays messages unchanged, over
one pair of Unix sockets for each client, and decodes none of them. Within the daemon's packages, it imports only
`platform`. The daemon's side is `weightd_daemon.transport.zmq_proxies`.
"""
