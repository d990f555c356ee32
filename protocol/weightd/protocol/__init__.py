"""The wire between clients, the daemon and its workers: messages, limits, errors. No sockets, no clock.

`weightd.protocol.wire` turns frames into the messages of `weightd.protocol.messages` and
`weightd.protocol.worker_messages`, and back; `weightd.protocol.tensors` does the same for numpy arrays.
The protocol is written down in docs/protocol.md.
"""
