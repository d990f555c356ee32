"""Scheduling of inference requests, from the queue of a model to the one reply that each request gets.

A request is the message of one client. A batch is what runs at once: one or more items, each of which is a request or
some rows of one. A slot is where a batch runs: one process, or several that compute together.

The modules of this package decide and count; callers pass events and the time. They start no processes and open no
sockets. This package may import `config`, `platform`, `counters`, `tenants` and the protocol. `generations` and this
package do not import each other.
"""
