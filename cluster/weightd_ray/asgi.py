"""What Ray Serve gives a replica, ASGI, as the gateway's HTTP has requests; and answers the other way round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote, unquote

from aiohttp import hdrs
from multidict import CIMultiDict, CIMultiDictProxy

from weightd_gateway.http.connection import ConnectionPhase
from weightd_gateway.http.request import HttpContent
from weightd_gateway.http.responses import HttpError, HttpReply

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_BODY_TIMEOUT = "the body of the request has not come in time"
_CALLER_GONE = "the caller has gone"

# Of a close of a WebSocket: it is of a kind that is not taken here.
_CLOSE_UNSUPPORTED = 1003


class Body:
    """The body of a request, piece by piece as the server of ASGI has it.

    Args:
        receive: of ASGI.
        timeout_s: seconds in which all of it has to come.
    """

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive = receive
        self._deadline = time.monotonic() + timeout_s
        self._has_more = True

    async def readexactly(self, n: int) -> bytes:
        """Return so many bytes, which are all of it.

        Raises:
            IncompleteReadError: it has fewer.
        """
        chunks: list[bytes] = []
        missing = n
        while missing > 0:
            chunk, _ = await self.readchunk()
            if not chunk:
                raise asyncio.IncompleteReadError(b"".join(chunks), n)
            chunks.append(chunk)
            missing -= len(chunk)
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return whole[:n] if missing else whole

    async def readchunk(self) -> tuple[bytes, bool]:
        """Return what has come, or b"" at the end.

        Raises:
            Refused: it has not come in time, or never will.
        """
        while self._has_more:
            try:
                message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise HttpError(408, _BODY_TIMEOUT) from None
            if message["type"] != "http.request":
                raise HttpError(400, _CALLER_GONE)
            self._has_more = message.get("more_body", False)
            chunk = message.get("body", b"")
            if chunk:
                return chunk, True
        return b"", False

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Return what has come, again and again."""
        while True:
            chunk, _ = await self.readchunk()
            if not chunk:
                return
            yield chunk


class AsgiConnection:
    """The connection of a caller, of whom Serve's proxy tells nothing: whoever reaches it may ask."""

    uid: int | None = None
    common_name: str | None = None

    def set_phase(self, phase: ConnectionPhase) -> None:
        """The connection is the proxy's to look after."""

    def begin_body(self, body: HttpContent) -> None:
        """The body has a time limit of its own."""


_ASGI_CONNECTION = AsgiConnection()


class AsgiRequest:
    """A request.

    Args:
        scope: of ASGI, of type http.
        receive: of ASGI.
        timeout_s: seconds in which its body has to come.

    Attributes:
        method: as Request.
        raw_path: likewise, below the prefix of the application.
        path: likewise.
        headers: likewise; but for who the caller says to be, which is between it and whatever stands before Serve.
        content_length: likewise.
        content: likewise.
        transport: likewise.
        protocol: likewise.
    """

    transport: asyncio.Transport | None = None
    protocol: object = _ASGI_CONNECTION

    def __init__(self, scope: Scope, receive: Receive, timeout_s: float) -> None:
        self.method: str = scope["method"]
        self.raw_path = _path_below_root(scope)
        self.path = unquote(self.raw_path)
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        headers.popall(hdrs.AUTHORIZATION, None)
        self.headers = CIMultiDictProxy(headers)
        self.content_length = _parse_length(headers.get(hdrs.CONTENT_LENGTH))
        self.content = Body(receive, timeout_s)


def _path_below_root(scope: Scope) -> str:
    """Return the path as it was sent, without what stands before the application's own."""
    root: str = scope.get("root_path", "")
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]
    for prefix in (root, quote(root)):
        if path.startswith(prefix):
            return path[len(prefix) :] or "/"
    return quote(scope["path"][len(root) :]) or "/"


def _parse_length(header: str | None) -> int | None:
    """Return what the server has looked at already."""
    return int(header) if header is not None and header.isascii() and header.isdecimal() else None


async def send_reply(reply: HttpReply, method: str, send: Send) -> None:
    """Send an answer. Serve copies it into a message of its own: so it is one piece."""
    headers = [("content-type", reply.content_type), ("content-length", str(reply.body_length)), *reply.headers.items()]
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    content = () if method == hdrs.METH_HEAD else reply.content
    body = bytes(content[0]) if len(content) == 1 else b"".join(content)
    reply.release()
    await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def handle_lifespan(receive: Receive, send: Send) -> None:
    """Say that there is nothing to wait for: a replica that is made serves, and its end is its destructor's."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def refuse_websocket(send: Send) -> None:
    """Close what is no request of HTTP: a WebSocket."""
    await send({"type": "websocket.close", "code": _CLOSE_UNSUPPORTED})
