"""A request and its reply, as the application receives and sends them by ASGI: headers, body, errors."""

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
"""The extension of ASGI's scope by which the gateway's own server passes on the `ServerConnection`."""

ENCODINGS = GZIP, DEFLATE, IDENTITY = ("gzip", "deflate", "identity")

# A body that is shorter is copied in no time.
_MIN_BUFFER_BYTES = 64 * 1024

# Bytes that are decompressed at once, before others have their turn.
_SLICE_BYTES = 256 * 1024

# Processors read fastest at addresses that are a multiple of this.
_ALIGNMENT = 64

MAX_COPIED_BYTES = 64 * 1024
"""Up to that many bytes one copy costs less than another call of the kernel."""

_PORT = re.compile(r":[0-9]*$")

_BODY_TIMEOUT = "the body of the request has not come in time"
_CALLER_GONE = "the caller has gone"

Buffer = bytes | memoryview


class ServerConnection(Protocol):
    """The connection of a request, where the server is the gateway's own."""

    @property
    def uid(self) -> int | None:
        """The number of the user at the other end of a Unix socket; None for any other connection."""
        ...

    @property
    def common_name(self) -> str | None:
        """The common name of the verified certificate of the other end; None without one."""
        ...

    async def receive_into(self, view: memoryview) -> None:
        """Receive that many bytes of the body, from the socket to where they belong."""
        ...


class HttpRequest:
    """A request.

    Args:
        scope: of ASGI, of type http.
        receive: of ASGI.
        body_timeout_s: seconds in which the body has to come; None where the server limits them.

    Attributes:
        method: "GET", or another.
        raw_path: the path as it was sent, below the prefix of the application and without the query.
        content_length: how many bytes the body has; None where the client does not say.
        connection: None where another server than the gateway's own has the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, body_timeout_s: float | None = None) -> None:
        self.method: str = scope["method"]
        self.raw_path = _path_below_root(scope)
        extensions: Mapping[str, Any] = scope.get("extensions") or {}
        self.connection: ServerConnection | None = extensions.get(CONNECTION)
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._first: dict[bytes, bytes] = dict(reversed(self._headers))
        length = self._first.get(b"content-length", b"")
        # The server has looked at it already.
        self.content_length = int(length) if length.isdigit() else None
        self._receive = receive
        self._deadline = None if body_timeout_s is None else time.monotonic() + body_timeout_s
        self._has_more = True

    def header(self, name: bytes) -> str:
        """Return the first value of a header, whose name is in lower case; "" where there is none."""
        return self._first.get(name, b"").decode("latin-1")

    def header_values(self, name: bytes) -> list[str]:
        """Return all values of a header, whose name is in lower case."""
        return [value.decode("latin-1") for each, value in self._headers if each == name]

    @property
    def traceparent(self) -> str:
        """The traceparent of the request; "" where there is no valid one."""
        return valid_traceparent(self.header(TRACEPARENT.encode()))

    def check_host(self, hosts: Collection[str]) -> None:
        """Check that the request is for this host: a page in a browser can have a name of its own point here.

        Raises:
            PermissionDenied: it is for another one.
        """
        host = _PORT.sub("", ",".join(self.header_values(b"host"))).lower()
        if host in hosts or ANY_HOST in hosts or (self.connection is not None and self.connection.uid is not None):
            return
        raise PermissionDenied(
            f"expected a host that is among `hosts` of the gateway's configuration, got {label(host)}"
        )

    def caller(self, authenticator: Authenticator) -> Caller:
        """Return who sent the request.

        Raises:
            Unauthenticated: nobody whom the gateway knows.
        """
        authorization = self.header_values(b"authorization")
        if len(authorization) > 1:
            raise Unauthenticated("expected one authorization")
        return authenticator.authenticate(
            token=parse_bearer(authorization[0]) if authorization else None,
            common_name=None if self.connection is None else self.connection.common_name,
            uid=None if self.connection is None else self.connection.uid,
        )

    async def read_chunk(self) -> bytes:
        """Return a part of the body, or b"" at its end.

        Raises:
            HttpError: it has not come in time, or never will.
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
        """Read that many bytes of the body.

        Raises:
            HttpError: they have not come in time, or never will.
            InvalidArgument: the body has fewer or more.
        """
        if self.connection is not None:
            await self.connection.receive_into(view)
            return
        while view:
            chunk = await self.read_chunk()
            if not 0 < len(chunk) <= len(view):
                raise InvalidArgument(f"expected a body of {self.content_length} bytes, as Content-Length says")
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
    """Return the body of a request in one piece of memory; the limits hold for what it is when decompressed.

    Args:
        request: nothing of its body has been read.
        permit: takes the bytes before there is memory for them.
        max_bytes: bytes that the body may have.
        allocate: returns an array of so many bytes.
        header_bytes: so many bytes are not tensors; what follows them begins at an aligned address.

    Raises:
        InvalidArgument: the body is not what its headers say.
        TooLarge: it has more bytes.
        ResourceExhausted: there is no memory for it now.
        HttpError: it has an unknown encoding, has not come in time, or never will.
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
    # What has come already, and is all of it, is one piece mostly.
    first = await request.read_chunk()
    if len(first) == length:
        return memoryview(first)
    view = memoryview(bytearray(length))
    if not 0 < len(first) < length:
        raise InvalidArgument(f"expected a body of {length} bytes, as Content-Length says")
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
    # Some clients send the format without the header of zlib.
    has_header = first[0] & 0x0F == zlib.DEFLATED
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


class HttpReply:
    """The reply to a request.

    Args:
        content: of it, in pieces that stay as they are until they are sent.
        content_type: its media type.
        status: of HTTP.
        headers: more of them, with values that hold no line breaks.
        permit: counts the content until it is sent, or given up.

    Attributes:
        headers: as above; more may be added.
        body_length: bytes of the content.
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
        """Send the reply, and release its content."""
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
                # Another server may copy it into a message of its own, so it is one piece.
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
    """Return a reply in JSON."""
    return HttpReply([to_json(content).encode()], JSON, status, headers)


def error_reply(error: RequestError) -> HttpReply:
    """Return the reply for an error: always JSON, for Triton's client reads no other."""
    retry_after_s = retry_after(error)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return json_reply({"error": str(error)}, status_of(error).http, headers)


class HttpError(Exception):
    """A request ends in an error that is HTTP's alone.

    Args:
        status: of it.
        text: for people.
        allowed: methods, where the method was wrong.
    """

    def __init__(self, status: int, text: str, allowed: str = "") -> None:
        super().__init__(text)
        self._status = status
        self._headers = {"Allow": allowed} if allowed else {}

    def reply(self) -> HttpReply:
        """Return the reply for the error."""
        return json_reply({"error": str(self)}, self._status, self._headers)
