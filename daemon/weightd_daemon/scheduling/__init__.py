"""Scheduling of inference requests, from the queue of a model to the one reply that each request gets.

A request is one inference message of a client. A batch is the unit that a slot runs at once: one or more batch items,
each of which is a whole request or some rows of a request. A slot is one worker process, or several processes that run
each batch together.

The modules of this package decide and count. They start no processes, open no sockets and read no clock: callers pass
events and the time. This package may import `config`, `platform`, `counters`, `tenants` and `weightd_protocol`.
`generations` and this package do not import each other.
"""
