"""The protocol between clients, the daemon and its workers: messages, encoding, limits, errors and versions.

The package has no sockets, no clock and no files. It imports no other package of weightd and supports Python 3.7.

`weightd_protocol.codec` converts frames to the messages of `weightd_protocol.messages` and back, using `schema`.
`weightd_protocol.tensors` does the same for numpy arrays. docs/protocol.md specifies the protocol for clients,
docs/architecture.md the protocol between the daemon and its child processes.
"""
