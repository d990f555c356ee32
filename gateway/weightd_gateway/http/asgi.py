"""The HTTP API as an ASGI application, for ASGI servers other than the gateway's own server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from weightd_gateway.http.head import RequestHead
from weightd_gateway.http.messages import HttpError, HttpReply, HttpRequest
from weightd_protocol.errors import InvalidArgument

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Close code for WebSockets, which the application does not support.
_CLOSE_UNSUPPORTED = 1003

_BODY_TIMEOUT = "the body of the request did not arrive in time"
_CALLER_GONE = "the caller has disconnected"


class AsgiRequest(HttpRequest):
    """A request that another ASGI server has received.

    Args:
        scope: the ASGI scope, of type http.
        receive: ASGI's receive function.
        body_timeout_s: seconds within which the body must arrive; None if the server enforces a limit.
    """

    def __init__(self, scope: Scope, receive: Receive, body_timeout_s: float | None = None) -> None:
        super().__init__(RequestHead(scope["method"], _path_below_root(scope), scope["headers"]))
        self._receive = receive
        self._deadline = None if body_timeout_s is None else time.monotonic() + body_timeout_s
        self._has_more = True

    def take(self, nbytes: int) -> bytes:
        """Return b"": only `receive` knows what has arrived."""
        return b""

    async def read_chunk(self) -> bytes:
        """See `HttpRequest.read_chunk`."""
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
        """See `HttpRequest.read_into`."""
        while view:
            chunk = await self.read_chunk()
            if not 0 < len(chunk) <= len(view):
                raise InvalidArgument(
                    f"expected a body of {self.head.content_length} bytes, according to Content-Length"
                )
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


async def send_reply(reply: HttpReply, method: str, send: Send) -> None:
    """Send the response to a request with this method in one message: a server may copy each message."""
    headers = [
        (b"content-type", reply.content_type.encode("latin-1")),
        (b"content-length", b"%d" % reply.body_length),
        *[(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()],
    ]
    try:
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        body = b"" if method == "HEAD" else b"".join(reply.content)
        await send({"type": "http.response.body", "body": body})
    finally:
        reply.release()


def asgi_app(reply_to: Callable[[HttpRequest], Awaitable[HttpReply]], body_timeout_s: float | None = None) -> AsgiApp:
    """Return the ASGI application that replies to requests with `reply_to`.

    Args:
        reply_to: returns the response to a request.
        body_timeout_s: seconds within which the body of a request must arrive; None if the server enforces a limit.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = AsgiRequest(scope, receive, body_timeout_s)
            await send_reply(await reply_to(request), request.head.method, send)
        elif scope["type"] == "lifespan":
            # Confirm startup and shutdown, at which the application has nothing to do.
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "websocket.close", "code": _CLOSE_UNSUPPORTED})

    return app
