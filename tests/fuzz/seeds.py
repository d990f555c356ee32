"""Writer of the seeds: each message of the protocol once, and page stores. Configurations are written by hand.

The seeds are kept in git; after a change of the protocol or the store: `python tests/fuzz/seeds.py`.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from pathlib import Path
from typing import Any

from targets import channel, decoder, framing, store, zmtp
from targets.decoder import TABLES
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.framing import LARGE_BYTES, message_prefix
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSpec
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import FROM_CLIENT
from weightd_protocol.messages.worker import TO_CHILD, Predict
from weightd_worker.pagesharing.store import encode_header, size_of

CORPUS = Path(__file__).parent / "corpus"

_SPECS = (TensorSpec("x", "FP32", (1, 4)), TensorSpec("empty", "BOOL", (2**40, 0)), TensorSpec("s", "INT64", ()))

_VALUES: dict[type, Any] = {str: "7", int: 7, bool: True, float: 0.5}

# Invalid values for a request's id, in msgpack.
_REFUSED: dict[str, bytes] = {
    "bytes": b"\xc4\x017",
    "deep": b"\x91" * 1100 + b"\xc0",
    "deep-maps": b"\x81\xa1a" * 600 + b"\xc0",
    "extension": b"\xd4\x057",
    "long": b"\xd9\x81" + b"i" * 129,
    "long-list": b"\xdd\xff\xff\xff\xff",
    "long-text": b"\xdb\xff\xff\xff\xff",
    "nil": b"\xc0",
    "not-utf8": b"\xa2\xed\xa0",
    "number": b"\xcb\x7f\xf0" + bytes(6),
    "timestamp": b"\xd6\xff" + bytes(4),
}


def seeds() -> dict[str, bytes]:
    """Return the generated seeds by their path in the corpus."""
    return {**_framing(), **_zmtp(), **_decoder(), **_channel(), **_store()}


def message(cls: type[Any]) -> Any:
    """Return a message of this type with a value in each field, also in optional ones."""
    hints = typing.get_type_hints(cls)
    kinds = {field.name: field.metadata.get("field_type") for field in dataclasses.fields(cls)}
    made = {name: _value(hints[name], kind.description if kind else "") for name, kind in kinds.items()}
    # The index of the only tensor: index 7 would not exist.
    made.update({name: value for name, value in (("tensor_index", 0), ("shared_outputs", (0,))) if name in made})
    return cls(**made)


def _value(hint: Any, description: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return message(typing.cast("type[Any]", hint))
    inner = [each for each in typing.get_args(hint) if each not in (type(None), ...)]
    if typing.get_origin(hint) is tuple:
        return (_value(inner[0], description),)
    if typing.get_origin(hint) is dict:
        return {"7": _value(inner[1], description)}
    if inner:
        return _value(inner[0], description)
    _, is_choice, names = description.partition("one of ")
    return names.split(", ")[0] if is_choice else _VALUES[hint]


def _framing() -> dict[str, bytes]:
    small = message_prefix([b"envelope", b"", b"xyz"]) + b"envelopexyz"
    large = struct.pack("<4I", 3, 2, 0, 2 * LARGE_BYTES - 1)
    found = {
        "small": framing.written(small + small),
        "cut": framing.written(*(small[at : at + 1] for at in range(len(small)))),
        "halves": framing.written(small[:-2], small[-2:] + small),
        "large": framing.written(large, b"ab" + small, 1, 2),
        "refused": framing.written(large, b"ab", 2, admitted=False),
        "header": framing.written(
            message_prefix([b"h" * (framing.HEADER_BYTES + 1), b"x"]), b"h" * framing.HEADER_BYTES, b"hx"
        ),
        "description": framing.written(message_prefix([b"e", b"d" * 40, b"x"]) + b"e" + b"d" * 40 + b"x" + small),
        "broken": framing.written(small, bytes(4)),
        "too-many": framing.written(small + struct.pack("<I", limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS + 1)),
        "too-long": framing.written(struct.pack("<2I", 1, framing.FRAME_BYTES + 1)),
    }
    return {f"framing/{name}": data for name, data in found.items()}


def _zmtp() -> dict[str, bytes]:
    small = b"\1\x08envelope\1\0\0\3xyz"
    large = b"\2" + (2 * LARGE_BYTES - 1).to_bytes(8, "big")
    found = {
        "small": zmtp.written(small + small),
        "cut": zmtp.written(*(small[at : at + 1] for at in range(len(small)))),
        "large": zmtp.written(b"\1\2ab" + large, b"cd" + small, 1, 2),
        "ping": zmtp.written(b"\4\x0a\4PING\0\0abc" + small),
        "many": zmtp.written(*[b"\0\1x" * 60] * 3),
        "handshake": zmtp.written(zmtp.GREETING[:20], zmtp.GREETING[20:] + zmtp.READY, small, is_ready=False),
        "no-greeting": zmtp.written(b"GET / HTTP/1.1\r\n", is_ready=False),
        "too-many": zmtp.written(b"\1\0" * (limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS) + b"\0\0"),
        "too-long": zmtp.written(b"\2" + (zmtp.BOUNDS.max_frame_bytes + 1).to_bytes(8, "big")),
        "flags": zmtp.written(small + b"\x10\0"),
    }
    return {f"zmtp/{name}": data for name, data in found.items()}


def _decoder() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for table in TABLES:
        for tag, cls in table.items():
            made = message(cls)
            # The only tensor may be in shared memory.
            found[f"decoder/{tag}"] = decoder.written(
                encode(made), table, () if hasattr(made, "shared_positions") else None
            )
    tensors = encode(Infer("7", RequestDescription("m", _SPECS), Parameters(500_000)))
    found["decoder/tensors"] = decoder.written(tensors, FROM_CLIENT)
    found["decoder/lengths"] = decoder.written(tensors, FROM_CLIENT, (16, 0, 8))
    for name, value in _REFUSED.items():
        found[f"decoder/refused-{name}"] = decoder.written(_with_id(value), FROM_CLIENT)
    [status] = encode(message(Status))
    found["decoder/refused-twice"] = decoder.written([b"\x84" + status[1:] + b"\xa2id\xa17"], FROM_CLIENT)
    too_large = encode(Predict(1, RequestDescription("m", (TensorSpec("x", "INT8", (2**40, 0, 2**23)),))))
    found["decoder/refused-empty"] = decoder.written(too_large, TO_CHILD)
    found["decoder/nothing"] = bytes([decoder.NO_FRAMES])
    return found


def _channel() -> dict[str, bytes]:
    timed, tensors = Parameters(5_000_000), (b"abcd", b"\1")
    valid = channel.packet_of(Infer("7", channel.DESCRIPTION, timed), *tensors, deadline_us=2**40)
    other = RequestDescription("m", channel.DESCRIPTION.inputs, ("y",))
    found = {
        "valid": (valid, channel.packet_of(Infer("8", channel.DESCRIPTION, timed), *tensors)),
        "no-parameters": (channel.packet_of(Infer("123456789012", channel.DESCRIPTION), *tensors),),
        "priority": (valid, channel.packet_of(Infer("7", channel.DESCRIPTION, Parameters(priority=1)), *tensors)),
        "tenant": (channel.packet_of(Infer("7", channel.DESCRIPTION, Parameters(tenant="t")), *tensors),),
        "other": (channel.packet_of(Infer("7", other, timed), *tensors),),
        "sizes": (valid, channel.packet_of(Infer("7", channel.DESCRIPTION, timed), b"abc", b"\1")),
        "name": (valid, channel.packet_of(Infer("seven", channel.DESCRIPTION, timed), *tensors)),
        "zeros": (valid, channel.packet_of(Infer("07", channel.DESCRIPTION, timed), *tensors)),
        "long-id": (valid, channel.packet_of(Infer("7" * 40, channel.DESCRIPTION, timed), *tensors)),
        "cut": (valid[:-1], valid[:30], valid[:8], b"", valid + b"x"),
    }
    return {f"channel/{name}": channel.written(*packets) for name, packets in found.items()}


def _with_id(value: bytes) -> list[bytes]:
    return [frame.replace(b"\xa17", value) for frame in encode(message(Status))]


def _store() -> dict[str, bytes]:
    three = struct.pack("<3Q", 1, 2, 1)
    return {
        "store/empty": store.written(b"", size=0),
        "store/unfinished": store.written(b"", size=size_of(1)),
        "store/no-pages": store.written(encode_header(0)),
        "store/pages": store.written(encode_header(3), three, bytes([0, 1, 2, 0x80, 1, 7])),
        "store/equal-pages": store.written(encode_header(20), b"", bytes(12)),
        "store/truncated": store.written(encode_header(3), three, size=size_of(3) - 1),
        "store/longer": store.written(encode_header(3), three, surplus=1),
        "store/largest": store.written(encode_header(2**64 - 1)),
    }


def main() -> None:
    """Write all seeds; other files of the corpus stay."""
    for name, data in seeds().items():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
