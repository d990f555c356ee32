"""A request, from its queue to its one answer.

A request is what a client has asked. A batch is what runs: one or more parts of requests. A slot is where it runs: one
or more processes that act together. Here are plain decisions, fed with events and the clock: no process is started
here and no socket is known. It may import `config`, `platform`, `counters`, `tenants` and the protocol; `generations`
and it do not know each other.
"""
