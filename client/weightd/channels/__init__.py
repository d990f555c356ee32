"""Direct channels of a client: requests go to a worker, and answers back, without the daemon on their way.

`requests` decides when the client asks for a channel. `calls` decides which inference requests take a channel, and
which of them are sent again; `tests/daemon/channels` runs it in a model of all processes. Neither does I/O. `sockets`
sends and receives packets.
"""
