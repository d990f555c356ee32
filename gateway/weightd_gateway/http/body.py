"""The body of a request, read into one piece of memory, within bounds that hold for what it is when decompressed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import hdrs
from aiohttp.http_exceptions import PayloadEncodingError

from weightd_gateway.admission_control import Permit
from weightd_gateway.error_codes import TooLarge
from weightd_gateway.http.request import HttpContent, HttpRequest
from weightd_gateway.http.responses import HttpError
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.schema import label

# Below it a body that lies elsewhere is copied in no time.
_MIN_BUFFER_BYTES = 64 * 1024

# Of what is decompressed at once, before others have their turn.
_SLICE_BYTES = 256 * 1024

# Of addresses at which processors read fastest.
_ALIGNMENT = 64

ENCODINGS = GZIP, DEFLATE, IDENTITY = ("gzip", "deflate", "identity")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def read_body(
    request: HttpRequest, permit: Permit, max_bytes: int, allocate: Callable[[int], Any], header_bytes: int = 0
) -> memoryview:
    """Return the body.

    Args:
        request: nothing of its body has been read.
        permit: takes the bytes before there is memory for them.
        max_bytes: bytes that it may have.
        allocate: returns an array of so many bytes.
        header_bytes: so many bytes are not tensors; what follows them is where processors like to have it.

    Raises:
        InvalidArgument: it is not what it says.
        TooLarge: it has more.
        ResourceExhausted: there is no memory for it now.
        Refused: it is encoded in another way.
    """
    headers = request.headers
    encoding = headers.get(hdrs.CONTENT_ENCODING, IDENTITY).strip().lower()
    if encoding not in ENCODINGS:
        raise HttpError(415, f"Content-Encoding: expected one of {', '.join(ENCODINGS)}, got {label(encoding)}")
    length = request.content_length
    if length is not None and length > max_bytes:
        raise TooLarge(f"expected a body of at most {max_bytes} bytes (max_body_bytes), got {length}")
    if headers.get(hdrs.EXPECT, "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(_CONTINUE)
    content = request.content
    try:
        if encoding == IDENTITY and length is not None:
            if not length:
                return memoryview(b"")
            permit.reserve(length)
            # What has come already, and is all of it, is one piece mostly.
            if length < _MIN_BUFFER_BYTES:
                return memoryview(await content.readexactly(length))
            return await _read_exactly(content, length, allocate, -header_bytes % _ALIGNMENT)
        chunks = content.iter_any()
        return await _collect(chunks if encoding == IDENTITY else _decompress(chunks, encoding), permit, max_bytes)
    except (asyncio.IncompleteReadError, PayloadEncodingError) as error:
        raise InvalidArgument(f"the body ends early, or is not chunked as it should be: {error}") from None


async def _read_exactly(content: HttpContent, length: int, allocate: Callable[[int], Any], offset: int) -> memoryview:
    view = memoryview(allocate(offset + length))[offset:]
    done = 0
    while done < length:
        # Not `readany`, which joins first what is then copied to where it belongs.
        chunk, _ = await content.readchunk()
        if not chunk:
            raise InvalidArgument(f"expected a body of {length} bytes, got {done}")
        view[done : done + len(chunk)] = chunk
        done += len(chunk)
    return view


async def _collect(chunks: AsyncIterator[bytes], permit: Permit, max_bytes: int) -> memoryview:
    body = bytearray()
    async for chunk in chunks:
        if len(body) + len(chunk) > max_bytes:
            raise TooLarge(f"expected a body of at most {max_bytes} bytes (max_body_bytes)")
        permit.reserve(len(chunk))
        body += chunk
    return memoryview(body)


async def _decompress(chunks: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield what is compressed in slices: a few bytes can be a thousand times as many."""
    inflater = None
    async for chunk in chunks:
        inflater = inflater or _make_inflater(encoding, chunk)
        if inflater.eof:
            raise InvalidArgument(f"there is more after the end of what is compressed ({encoding})")
        rest, is_full = chunk, True
        while rest or is_full:
            try:
                inflated = inflater.decompress(rest, _SLICE_BYTES)
            except zlib.error as error:
                raise InvalidArgument(f"expected a body in {encoding}: {error}") from None
            rest, is_full = inflater.unconsumed_tail, len(inflated) == _SLICE_BYTES
            if inflated:
                yield inflated
            await asyncio.sleep(0)
        if inflater.unused_data:
            raise InvalidArgument(f"there is more after the end of what is compressed ({encoding})")
    if inflater is not None and not inflater.eof:
        raise InvalidArgument(f"the body ends before what is compressed does ({encoding})")


def _make_inflater(encoding: str, first: bytes) -> Any:
    if encoding == GZIP:
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    # Some call so what has no header of zlib.
    has_header = first[0] & 0x0F == zlib.DEFLATED
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
