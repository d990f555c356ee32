"""Requests and responses of the HTTP API: bodies and errors."""

from __future__ import annotations

import abc
import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from weightd_gateway.error_codes import TooLarge, retry_after, status_of
from weightd_gateway.fairness import Permit
from weightd_gateway.http.head import RequestHead
from weightd_gateway.tensors import to_json
from weightd_protocol.errors import InvalidArgument, RequestError, Unauthenticated
from weightd_protocol.schema import label

JSON = "application/json"
BINARY = "application/octet-stream"

ANY_HOST = "*"

ENCODINGS = GZIP, DEFLATE, IDENTITY = ("gzip", "deflate", "identity")

# Minimum bytes of a body that is received directly into its final memory. For shorter bodies, a copy is cheap.
_MIN_BUFFER_BYTES = 64 * 1024

# Bytes that are decompressed at a time, before the event loop runs other tasks.
_SLICE_BYTES = 256 * 1024

# Alignment of tensors in bytes: processors read fastest at such addresses.
_ALIGNMENT = 64

MAX_COPIED_BYTES = 64 * 1024
"""Buffers of at most this many bytes together are joined, because copying is cheaper than another system call."""

Buffer = bytes | memoryview


class HttpRequest(abc.ABC):
    """An HTTP request.

    Args:
        head: the head of the request.

    Attributes:
        head: as above.
        uid: the uid of the peer of a Unix socket, from the kernel; None for other connections.
        common_name: the common name of the client certificate that TLS has verified; None without one.
    """

    uid: int | None = None
    common_name: str | None = None

    def __init__(self, head: RequestHead) -> None:
        self.head = head

    @abc.abstractmethod
    def take(self, nbytes: int) -> bytes:
        """Return at most `nbytes` bytes of the body that have arrived; b"" if none have."""

    @abc.abstractmethod
    async def read_chunk(self) -> bytes:
        """Return the next part of the body, or b"" at its end.

        Raises:
            HttpError: the body did not arrive in time, or the client disconnected.
        """

    @abc.abstractmethod
    async def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the body.

        Raises:
            HttpError: the body did not arrive in time, or the client disconnected.
            InvalidArgument: the length of the body differs from Content-Length.
        """


async def read_body(
    request: HttpRequest, permit: Permit, max_bytes: int, allocate: Callable[[int], Any], header_bytes: int = 0
) -> memoryview:
    """Return the body of a request as one buffer. The limits apply to the decompressed body.

    Args:
        request: a request whose body has not been read.
        permit: reserves the bytes before they are allocated.
        max_bytes: the maximum size of the body.
        allocate: returns an array of the given number of bytes.
        header_bytes: the size of the JSON at the beginning; the tensors after it begin at an aligned address.

    Raises:
        InvalidArgument: the body does not match the headers Content-Length and Content-Encoding.
        TooLarge: the body is larger than `max_bytes`, or than the limit for all requests together.
        ResourceExhausted: other requests have reserved too many bytes at the moment.
        HttpError: the encoding is unknown, the body did not arrive in time, or the client disconnected.
    """
    encoding = request.head.encoding or IDENTITY
    if encoding not in ENCODINGS:
        raise HttpError(415, f"Content-Encoding: expected one of {', '.join(ENCODINGS)}, got {label(encoding)}")
    length = request.head.content_length
    if length is not None and length > max_bytes:
        raise TooLarge(f"expected a body of at most {max_bytes} bytes (max_body_bytes), got {length}")
    if encoding != IDENTITY or length is None:
        return await _collect(request, encoding, permit, max_bytes)
    if not length:
        return memoryview(b"")
    permit.reserve(length)
    if length >= _MIN_BUFFER_BYTES:
        offset = -header_bytes % _ALIGNMENT
        view = memoryview(allocate(offset + length))[offset:]
        await request.read_into(view)
        return view
    # A short body has usually arrived by now.
    first = request.take(length)
    if len(first) == length:
        return memoryview(first)
    view = memoryview(bytearray(length))
    view[: len(first)] = first
    await request.read_into(view[len(first) :])
    return view


async def _collect(request: HttpRequest, encoding: str, permit: Permit, max_bytes: int) -> memoryview:
    body = bytearray()
    chunks = _chunks_of(request)
    async for chunk in chunks if encoding == IDENTITY else _decompress(chunks, encoding):
        if len(body) + len(chunk) > max_bytes:
            raise TooLarge(f"expected a body of at most {max_bytes} bytes (max_body_bytes)")
        permit.reserve(len(chunk))
        body += chunk
    return memoryview(body)


async def _chunks_of(request: HttpRequest) -> AsyncIterator[bytes]:
    while chunk := await request.read_chunk():
        yield chunk


async def _decompress(chunks: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yield decompressed data in slices of limited size: the data can be a thousand times larger than the input."""
    inflater = None
    async for chunk in chunks:
        inflater = inflater or _make_inflater(encoding, chunk)
        if inflater.eof:
            raise InvalidArgument(f"unexpected data after the end of the compressed body ({encoding})")
        rest, is_full = chunk, True
        while rest or is_full:
            try:
                inflated = inflater.decompress(rest, _SLICE_BYTES)
            except zlib.error as error:
                raise InvalidArgument(f"invalid {encoding} body: {error}") from None
            rest, is_full = inflater.unconsumed_tail, len(inflated) == _SLICE_BYTES
            if inflated:
                yield inflated
            await asyncio.sleep(0)
        if inflater.unused_data:
            raise InvalidArgument(f"unexpected data after the end of the compressed body ({encoding})")
    if inflater is not None and not inflater.eof:
        raise InvalidArgument(f"the compressed body is truncated ({encoding})")


def _make_inflater(encoding: str, first: bytes) -> Any:
    if encoding == GZIP:
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    # Some clients send raw deflate data without the zlib header.
    has_header = first[0] & 0x0F == zlib.DEFLATED
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


class HttpReply:
    """An HTTP response.

    Args:
        content: the body as a sequence of buffers, which must not change until they are sent.
        content_type: the media type.
        status: the HTTP status.
        headers: further headers; their values must not contain line breaks.

    Attributes:
        content_type: as above.
        headers: as above; entries may be added.
        body_length: the length of the content in bytes.
        permit: reserves the bytes of the content; released when the content has been sent or dropped.
    """

    def __init__(
        self,
        content: Sequence[Buffer],
        content_type: str = JSON,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.content = content
        self.status = status
        self.content_type = content_type
        self.headers = {} if headers is None else dict(headers)
        self.body_length = sum(map(len, content))
        self.permit: Permit | None = None

    def release(self) -> None:
        """Release the content, because it has been sent or dropped."""
        self.content = ()
        if self.permit is not None:
            self.permit.release()


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return a JSON response."""
    return HttpReply([to_json(content).encode()], JSON, status, headers)


def error_reply(error: RequestError) -> HttpReply:
    """Return the response for an error. The body is always JSON, the only form that Triton's client reads."""
    retry_after_s = retry_after(error)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return json_reply({"error": str(error)}, status_of(error).http, headers)


class HttpError(Exception):
    """An error with an HTTP status that has no counterpart in gRPC.

    Args:
        status: the HTTP status.
        text: the message for the client.
        allowed: the methods for the Allow header, if the method was wrong.
    """

    def __init__(self, status: int, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self._status = status
        self._headers = {"Allow": allowed} if allowed else {}

    def reply(self) -> HttpReply:
        """Return the response for the error."""
        return json_reply({"error": str(self)}, self._status, self._headers)
