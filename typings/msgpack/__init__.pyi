# The part of msgpack 1.0 that weightd uses.
from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

version: tuple[int, int, int]

class UnpackException(Exception): ...
class OutOfData(UnpackException): ...
class BufferFull(UnpackException): ...
class FormatError(ValueError, UnpackException): ...
class StackError(ValueError, UnpackException): ...

class ExtType:
    code: int
    data: bytes
    def __new__(cls, code: int, data: bytes) -> ExtType: ...

class Unpacker:
    def __init__(
        self, *, max_buffer_size: int = ..., max_array_len: int = ..., max_map_len: int = ..., max_ext_len: int = ...
    ) -> None: ...
    def feed(self, next_bytes: Buffer) -> None: ...
    def unpack(self) -> Any: ...
    def read_map_header(self) -> int: ...

def packb(
    o: object,
    *,
    default: Callable[[Any], object] | None = ...,
    use_single_float: bool = ...,
    autoreset: bool = ...,
    use_bin_type: bool = ...,
    strict_types: bool = ...,
    datetime: bool = ...,
    unicode_errors: str | None = ...,
) -> bytes: ...
def unpackb(
    packed: Buffer,
    *,
    object_hook: Callable[[dict[Any, Any]], object] | None = ...,
    object_pairs_hook: Callable[[list[tuple[Any, Any]]], object] | None = ...,
    list_hook: Callable[[list[Any]], object] | None = ...,
    use_list: bool = ...,
    raw: bool = ...,
    timestamp: int = ...,
    strict_map_key: bool = ...,
    unicode_errors: str | None = ...,
    ext_hook: Callable[[int, bytes], object] = ...,
    max_str_len: int = ...,
    max_bin_len: int = ...,
    max_array_len: int = ...,
    max_map_len: int = ...,
    max_ext_len: int = ...,
) -> Any: ...
