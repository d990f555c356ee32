"""The wire between clients, the daemon and its workers, and nothing else: messages, limits, errors, versions.

No sockets, no clock, no files. Imports nothing of weightd but itself; runs on Python 3.7.

`weightd_protocol.codec` turns frames into the messages of `weightd_protocol.messages`, and back, by means of `schema`;
`weightd_protocol.tensors` does the same for numpy arrays. docs/protocol.md describes the messages of clients,
docs/architecture.md the messages between the daemon and its children.
"""
