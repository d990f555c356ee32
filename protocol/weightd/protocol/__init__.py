"""The wire between clients, the daemon and its workers: messages, limits, errors. No sockets, no clock.

`weightd.protocol.codec` turns frames into the messages of `weightd.protocol.messages`, and back;
`weightd.protocol.tensors` does the same for numpy arrays.
The protocol is written down in docs/protocol.md.
"""
