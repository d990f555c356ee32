"""Headers that differ from an earlier one in nothing but the request's number: recognised instead of parsed.

A client sends the same shapes again and again. Of the four messages of a request only the id changes, and the encoder
writes it right after version and type: the bytes before it are the same for every message of the type, and those after
it have been seen before. That saves most of what a small request costs in Python.

Guarantees. Reading: a header of known bytes around a well-formed id is what the full decoder made of these bytes when
it accepted them, with this id; any other header is left to the full decoder. Writing: a message with the same tensors
(the same object: they are immutable) and equal other fields gets the bytes that the full encoder gave it, with its id.
So nothing is accepted, and nothing sent, that would not be without this module.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import msgpack

from weightd.protocol import limits

# The shapes that are in use at a time; more only make it slower. With the bound of a header: 512 KiB a type at most.
_MAX_KNOWN = 256
_MAX_HEADER_BYTES = 2048

# What the first byte of a msgpack value says of its size. A longer text is left to the full decoder.
_INTEGER_BYTES: Mapping[int, int] = {**dict.fromkeys(range(0x80), 1), 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_TEXT_BYTES: Mapping[int, int] = {0xA0 + length: 1 + length for length in range(1, 32)}


class Repeats:
    """What has been read and written of one type of message.

    Args:
        cls: the message; its field `key` comes first, and it has tensors.
        tag: its tag on the wire.
        key: the field that changes: a text or an integer.
    """

    def __init__(self, cls: Type[Any], tag: str, key: str, *, is_text: bool) -> None:
        self.cls = cls
        self._key = key
        self._is_text = is_text
        self._sizes = _TEXT_BYTES if is_text else _INTEGER_BYTES
        lead: bytes = b"".join(map(msgpack.packb, ("v", limits.PROTOCOL_VERSION, "type", tag, key)))
        self._lead = lead
        self._start = 1 + len(lead)  # the first byte is the map's
        # The header without its id: the other fields, and the sizes of the tensor frames.
        self._read: Dict[bytes, Tuple[Dict[str, Any], List[int]]] = {}
        # By id() of the tensors, which the entry keeps alive: the other fields, and the header around the id.
        self._written: Dict[int, Tuple[Dict[str, Any], bytes, bytes]] = {}

    def recognise(self, frames: Sequence[Any]) -> Any:
        """Return the message of `frames`, or None if it is not known."""
        header, start = frames[0], self._start
        if type(header) is not bytes or not start < len(header) <= _MAX_HEADER_BYTES:
            return None
        end = start + self._sizes.get(header[start], _MAX_HEADER_BYTES)
        known = self._read.get(header[:start] + header[end:])
        if known is None or known[1] != [len(frame) for frame in frames[1:]]:
            return None
        value = self._unpack(header, start, end)
        if value is None:
            return None
        # What __init__ of a frozen dataclass does, in a third of the time.
        message = object.__new__(self.cls)
        message.__dict__.update(known[0])
        message.__dict__[self._key] = value
        return message

    def learn(self, frames: Sequence[Any], message: Any) -> None:
        """Remember a header that the full decoder has accepted as `message`."""
        header, start = frames[0], self._start
        if type(header) is not bytes or len(header) > _MAX_HEADER_BYTES or header[1:start] != self._lead:
            return
        size = self._sizes.get(header[start])
        if size is None:
            return
        if len(self._read) >= _MAX_KNOWN:
            self._read.clear()
        self._read[header[:start] + header[start + size :]] = (
            self._others(message),
            [len(each) for each in frames[1:]],
        )

    def write(self, message: Any) -> Optional[bytes]:
        """Return the header of `message`, or None if it is not known."""
        known = self._written.get(id(message.tensors))
        if known is None:
            return None
        others, before, after = known
        fields = message.__dict__
        for name, value in others.items():
            given = fields[name]
            if given is not value and (type(given) is tuple or type(given) is not type(value) or given != value):
                return None
        value = fields[self._key]
        if self._is_text:
            # Other texts are rare, and the full encoder knows what may be sent.
            if type(value) is not str or not (0 < len(value) < 32 and value.isascii()):
                return None
        elif type(value) is not int or not 0 <= value < 2**63:
            return None
        packed: bytes = msgpack.packb(value)
        return before + packed + after

    def wrote(self, message: Any, header: bytes) -> None:
        """Remember the header that the full encoder has made of `message`."""
        start = self._start
        if len(header) > _MAX_HEADER_BYTES or header[1:start] != self._lead:
            return
        size = self._sizes.get(header[start])
        if size is None:
            return
        if len(self._written) >= _MAX_KNOWN:
            self._written.clear()
        self._written[id(message.tensors)] = (self._others(message), header[:start], header[start + size :])

    def _others(self, message: Any) -> Dict[str, Any]:
        return {name: value for name, value in message.__dict__.items() if name != self._key}

    def _unpack(self, header: bytes, start: int, end: int) -> Any:
        """The id, or None where the full decoder has something to say about it."""
        if self._is_text:
            text = header[start + 1 : end]
            return text.decode("ascii") if text.isascii() else None
        if end == start + 1:
            return header[start]
        value = int.from_bytes(header[start + 1 : end], "big")
        return value if value < 2**63 else None
