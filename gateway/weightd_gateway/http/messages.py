"""Requests and responses of the ASGI application: headers, bodies and errors."""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any, Protocol
from urllib.parse import quote

from weightd_gateway.auth import Authenticator, Caller, parse_bearer
from weightd_gateway.daemon_client import TRACEPARENT, valid_traceparent
from weightd_gateway.error_codes import TooLarge, retry_after, status_of
from weightd_gateway.fairness import Permit
from weightd_gateway.tensors import to_json
from weightd_protocol.errors import InvalidArgument, PermissionDenied, RequestError, Unauthenticated
from weightd_protocol.schema import label

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = "application/json"
BINARY = "application/octet-stream"

ANY_HOST = "*"

CONNECTION = "weightd.connection"
"""Key of the ASGI scope extension with which the gateway's own server passes its `ServerConnection`."""

ENCODINGS = GZIP, DEFLATE, IDENTITY = ("gzip", "deflate", "identity")

# Minimum bytes of a body that is received directly into its final memory. For shorter bodies, a copy is cheap.
_MIN_BUFFER_BYTES = 64 * 1024

# Bytes that are decompressed at a time, before the event loop runs other tasks.
_SLICE_BYTES = 256 * 1024

# Alignment of tensors in bytes: processors read fastest at such addresses.
_ALIGNMENT = 64

MAX_COPIED_BYTES = 64 * 1024
"""Buffers of at most this many bytes together are joined, because copying is cheaper than another system call."""

_PORT = re.compile(r":[0-9]*$")

_BODY_TIMEOUT = "the body of the request did not arrive in time"
_CALLER_GONE = "the caller has disconnected"

Buffer = bytes | memoryview


class ServerConnection(Protocol):
    """A connection of the gateway's own HTTP server, as the ASGI application sees it."""

    @property
    def uid(self) -> int | None:
        """The uid of the peer of a Unix socket; None for other connections."""
        ...

    @property
    def common_name(self) -> str | None:
        """The common name of the client certificate that TLS has verified; None without one."""
        ...

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view` with bytes of the body, directly from the socket."""
        ...


class HttpRequest:
    """An HTTP request.

    Args:
        scope: the ASGI scope, of type http.
        receive: ASGI's receive function.
        body_timeout_s: seconds within which the body must arrive; None if the server enforces a limit.

    Attributes:
        method: the method, such as "GET".
        raw_path: the percent-encoded path below the application's root path, without the query.
        content_length: the length of the body in bytes; None if the client does not send it.
        connection: the connection of the gateway's own server; None if another ASGI server received the request.
    """

    def __init__(self, scope: Scope, receive: Receive, body_timeout_s: float | None = None) -> None:
        self.method: str = scope["method"]
        self.raw_path = _path_below_root(scope)
        extensions: Mapping[str, Any] = scope.get("extensions") or {}
        self.connection: ServerConnection | None = extensions.get(CONNECTION)
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._first: dict[bytes, bytes] = dict(reversed(self._headers))
        length = self._first.get(b"content-length", b"")
        # The ASGI server has already validated the value.
        self.content_length = int(length) if length.isdigit() else None
        self._receive = receive
        self._deadline = None if body_timeout_s is None else time.monotonic() + body_timeout_s
        self._has_more = True

    def header(self, name: bytes) -> str:
        """Return the first value of a header, given its lower-case name; "" if the header is missing."""
        return self._first.get(name, b"").decode("latin-1")

    def header_values(self, name: bytes) -> list[str]:
        """Return all values of a header, given its lower-case name."""
        return [value.decode("latin-1") for each, value in self._headers if each == name]

    @property
    def traceparent(self) -> str:
        """The traceparent of the request; "" if it is missing or invalid."""
        return valid_traceparent(self.header(TRACEPARENT.encode()))

    def check_host(self, hosts: Collection[str]) -> None:
        """Check the Host header against DNS rebinding, in which a web page makes its own name resolve to this host.

        Raises:
            PermissionDenied: the host is not allowed.
        """
        host = _PORT.sub("", ",".join(self.header_values(b"host"))).lower()
        if host in hosts or ANY_HOST in hosts or (self.connection is not None and self.connection.uid is not None):
            return
        raise PermissionDenied(f"expected a host from `hosts` in the gateway's configuration, got {label(host)}")

    def caller(self, authenticator: Authenticator) -> Caller:
        """Return the authenticated caller of the request.

        Raises:
            Unauthenticated: the credentials are missing or unknown.
        """
        authorization = self.header_values(b"authorization")
        if len(authorization) > 1:
            raise Unauthenticated("expected one authorization header")
        return authenticator.authenticate(
            token=parse_bearer(authorization[0]) if authorization else None,
            common_name=None if self.connection is None else self.connection.common_name,
            uid=None if self.connection is None else self.connection.uid,
        )

    async def read_chunk(self) -> bytes:
        """Return the next part of the body, or b"" at its end.

        Raises:
            HttpError: the body did not arrive in time, or the client disconnected.
        """
        while self._has_more:
            message = await self._next_message()
            if message["type"] != "http.request":
                raise HttpError(400, _CALLER_GONE)
            self._has_more = message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            if chunk:
                return chunk
        return b""

    async def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the body.

        Raises:
            HttpError: the body did not arrive in time, or the client disconnected.
            InvalidArgument: the length of the body differs from Content-Length.
        """
        if self.connection is not None:
            await self.connection.receive_into(view)
            return
        while view:
            chunk = await self.read_chunk()
            if not 0 < len(chunk) <= len(view):
                raise InvalidArgument(f"expected a body of {self.content_length} bytes, according to Content-Length")
            view[: len(chunk)] = chunk
            view = view[len(chunk) :]

    async def _next_message(self) -> Message:
        if self._deadline is None:
            return await self._receive()
        try:
            return await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise HttpError(408, _BODY_TIMEOUT) from None


def _path_below_root(scope: Scope) -> str:
    root: str = scope.get("root_path", "")
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("utf-8", "surrogateescape").partition("?")[0]
    if not root:
        return path
    for prefix in (root, quote(root)):
        if path.startswith(prefix):
            return path[len(prefix) :] or "/"
    return quote(scope["path"][len(root) :]) or "/"


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
    encoding = request.header(b"content-encoding").strip().lower() or IDENTITY
    if encoding not in ENCODINGS:
        raise HttpError(415, f"Content-Encoding: expected one of {', '.join(ENCODINGS)}, got {label(encoding)}")
    length = request.content_length
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
    # A short body has usually arrived by now, and is returned as one chunk.
    first = await request.read_chunk()
    if len(first) == length:
        return memoryview(first)
    view = memoryview(bytearray(length))
    if not 0 < len(first) < length:
        raise InvalidArgument(f"expected a body of {length} bytes, according to Content-Length")
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
        permit: reserves the bytes of the content; released when the content has been sent or dropped.

    Attributes:
        headers: as above; entries may be added.
        body_length: the length of the content in bytes.
    """

    def __init__(
        self,
        content: Sequence[Buffer],
        content_type: str = JSON,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        permit: Permit | None = None,
    ) -> None:
        self.content = content
        self.status = status
        self.content_type = content_type
        self.headers = dict(headers or {})
        self.body_length = sum(map(len, content))
        self._permit = permit

    async def send(self, request: HttpRequest, send: Send) -> None:
        """Send the response and release its content."""
        headers = [
            (b"content-type", self.content_type.encode("latin-1")),
            (b"content-length", b"%d" % self.body_length),
            *[(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()],
        ]
        try:
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            if request.method == "HEAD":
                await send({"type": "http.response.body", "body": b""})
            elif self.body_length <= MAX_COPIED_BYTES or request.connection is None:
                # Join small content into one message. Content for another ASGI server is also joined, because such a
                # server may copy each message.
                await send({"type": "http.response.body", "body": b"".join(self.content)})
            else:
                last = len(self.content) - 1
                for index, each in enumerate(self.content):
                    await send({"type": "http.response.body", "body": each, "more_body": index < last})
        finally:
            self.content = ()
            if self._permit is not None:
                self._permit.release()


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
