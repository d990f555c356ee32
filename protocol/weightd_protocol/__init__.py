"""The protocol between clients, the daemon and its workers: messages, encoding, limits, errors and versions.

This package uses no sockets, no clock and no files. It imports no other package of weightd and supports Python 3.7.

`weightd_protocol.codec` converts frames to the messages declared in `weightd_protocol.messages`, and messages to
frames. It uses `weightd_protocol.schema`. `weightd_protocol.tensors` converts between tensor frames and numpy arrays.
docs/protocol.md specifies the protocol for clients; docs/architecture.md describes the protocol between the daemon and
its child processes.
"""
