"""One request on a connection of HTTP/1.1, and its reply: llhttp parses, ASGI is spoken with the application."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from weightd_gateway.http.messages import CONNECTION, HttpError, Message, Scope, ServerConnection

MAX_FIELD_BYTES = 8190
"""Bytes of the request's target, and of one header."""

MAX_HEAD_BYTES = 32 * 1024
"""Bytes of all headers, together with the request line."""

MAX_HEADERS = 64

# Bytes of a chunked body that are decoded at once: those of the smallest chunks take a third of a millisecond.
_PIECE_BYTES = 2 * 1024

# Bytes that chunks may take for each byte that is in them; the smallest chunk takes five.
_MAX_CHUNK_OVERHEAD = 16

_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BODY_TIMEOUT = "the body of the request has not come in time (receive_timeout)"

_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {phrase}\r\n".encode()
    for status, phrase in [*((each.value, each.phrase) for each in HTTPStatus), (499, "Client Closed Request")]
}


class RequestParser:
    """Parses one request: its head, and a body in chunks. A body whose length is known is not for this.

    Attributes:
        target: what stands in the request line.
        headers: names in lower case, and values.
        keep_alive: whether the client expects the connection to go on.
        is_head_complete: whether all headers are there.
        is_complete: whether the parser expects nothing more.
        chunks: what has been decoded of the body.
    """

    def __init__(self) -> None:
        self._parser: Any = HttpRequestParser(self)
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.keep_alive = False
        self.is_head_complete = False
        self.is_complete = False
        self.chunks: list[bytes] = []
        # Bytes that may still come until there are more in the body.
        self._allowance = MAX_HEAD_BYTES

    @property
    def method(self) -> str:
        """The method of the request."""
        return str(self._parser.get_method(), "ascii")

    @property
    def version(self) -> str:
        """The version of HTTP, such as "1.1"."""
        return str(self._parser.get_http_version())

    def feed(self, data: bytearray, limit: int = MAX_HEAD_BYTES) -> bool:
        """Parse the first part of `data` that belongs to this request, and remove it; return whether there was one.

        A head, and a body in chunks, can end nowhere but after an empty line: so nothing of the next request is parsed.

        Raises:
            HttpParserError: that is no HTTP, or there is too much of it.
        """
        found = data.find(_END, 0, limit)
        if found >= 0:
            size = found + len(_END)
        else:
            # The last bytes may be the first ones of an empty line.
            part = bytes(memoryview(data)[:limit])
            size = max(len(part.rstrip(b"\r\n")), len(part) - len(_END) + 1)
        if not size:
            return False
        self._allowance -= size
        if self._allowance < 0:
            raise HttpParserError(f"more than {MAX_HEAD_BYTES} bytes of headers, or of what is between chunks")
        taken = bytes(memoryview(data)[:size])
        del data[:size]
        try:
            self._parser.feed_data(taken)
        except HttpParserUpgrade:
            # It goes on as HTTP: nothing else is spoken here.
            self.keep_alive = False
        return True

    def on_url(self, target: bytes) -> None:  # noqa: D102 - these are httptools' names
        self.target += target
        if len(self.target) > MAX_FIELD_BYTES:
            raise ValueError(f"expected a target of at most {MAX_FIELD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        if self.is_head_complete:
            return
        if len(self.headers) == MAX_HEADERS or len(name) + len(value) > MAX_FIELD_BYTES:
            raise ValueError(f"expected at most {MAX_HEADERS} headers of {MAX_FIELD_BYTES} bytes")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:  # noqa: D102
        self.keep_alive = self._parser.should_keep_alive()
        self.is_head_complete = True

    def on_body(self, body: bytes) -> None:  # noqa: D102
        self._allowance += (1 + _MAX_CHUNK_OVERHEAD) * len(body)
        self.chunks.append(body)

    def on_message_complete(self) -> None:  # noqa: D102
        self.is_complete = True


class ExchangeConnection(ServerConnection, Protocol):
    """What an exchange uses of its connection.

    Attributes:
        unparsed: what has been received and not been used.
    """

    unparsed: bytearray

    def write(self, *content: bytes | memoryview) -> None:
        """Send bytes."""
        ...

    async def drain(self) -> None:
        """Return when the client has read enough of what was sent."""
        ...

    def begin_body(self) -> None:
        """More of the body is waited for."""
        ...

    def end_body(self) -> None:
        """All of the body has been received."""
        ...

    def run_fairly(self, exchange: HttpExchange) -> None:
        """Call `HttpExchange.decode` when it is the peer's turn."""
        ...


class HttpExchange:
    """A request from its head to the end of its reply.

    Args:
        parser: has parsed the head.
        connection: the connection.

    Attributes:
        keep_alive: whether the connection can go on.
        target: where the body is to be received; None: where everything is.
        is_started: whether a part of the reply was sent.
        is_replied: whether all of it was sent.
    """

    def __init__(self, parser: RequestParser, connection: ExchangeConnection) -> None:
        self._parser = parser
        self._connection = connection
        self.keep_alive = parser.keep_alive
        self.target: memoryview | None = None
        self.is_started = False
        self.is_replied = False
        self._start: Message = {}
        headers = dict(parser.headers)
        # None: in chunks, or nothing.
        self._bytes_left = None if parser.is_complete else _length_of(headers)
        self._expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._waiter: asyncio.Future[None] | None = None
        self._error: HttpError | None = None
        self._is_discarding = False
        self._is_decoding = False

    @property
    def is_body_complete(self) -> bool:
        """Whether all of the body has been taken out of what was received."""
        return self._parser.is_complete if self._bytes_left is None else not self._bytes_left

    def scope(self) -> Scope:
        """Return the scope of ASGI."""
        parser = self._parser
        raw_path, _, query = parser.target.partition(b"?")
        path = raw_path.decode("utf-8", "surrogateescape")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": parser.version,
            "method": parser.method,
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": parser.headers,
            "extensions": {CONNECTION: self._connection},
        }

    # --- the body ----------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Return what has come of the body, when something has, as ASGI wants it.

        Raises:
            HttpError: it has not come in time.
        """
        self._ask_for_body()
        while not (body := self._take()) and not self.is_body_complete:
            await self._wait()
        has_more = not self.is_body_complete
        if not has_more:
            self._connection.end_body()
        return {"type": "http.request", "body": body, "more_body": has_more}

    async def receive_into(self, view: memoryview) -> None:
        """Receive that many bytes of the body, whose length is known.

        Raises:
            HttpError: they have not come in time.
        """
        if self._bytes_left is None or len(view) > self._bytes_left:
            raise ValueError("expected no more bytes than the body has left")
        self._ask_for_body()
        received = self._take(len(view))
        view[: len(received)] = received
        self.target = view[len(received) :] or None
        try:
            while self.target is not None:
                await self._wait()
        finally:
            self.target = None
        if not self._bytes_left:
            self._connection.end_body()

    def _ask_for_body(self) -> None:
        if self._expects_continue:
            self._expects_continue = False
            self._connection.write(_CONTINUE)

    def _take(self, limit: int | None = None) -> bytes:
        """Remove what has come of the body, and return it."""
        if self._bytes_left is None:
            body = b"".join(self._parser.chunks)
            self._parser.chunks.clear()
            return body
        unparsed = self._connection.unparsed
        size = self._bytes_left if limit is None else limit
        body = bytes(memoryview(unparsed)[:size])
        del unparsed[:size]
        self._bytes_left -= len(body)
        return body

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        self._connection.begin_body()
        self.on_data()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def on_data(self) -> None:
        """More has been received."""
        if self._bytes_left is None:
            if (
                (self._waiter is not None or self._is_discarding)
                and not self._is_decoding
                and self._connection.unparsed
            ):
                self._is_decoding = True
                self._connection.run_fairly(self)
        elif self._is_discarding:
            self._take()
        elif self._connection.unparsed:
            self._wake()

    def on_received(self, count: int) -> None:
        """So many bytes have been received into `target`."""
        if self.target is not None and self._bytes_left is not None:
            self._bytes_left -= count
            self.target = self.target[count:] or None
            if self.target is None:
                self._wake()

    def decode(self) -> None:
        """Decode a piece of a body in chunks.

        Raises:
            HttpParserError: it is none.
        """
        self._is_decoding = False
        parser, unparsed = self._parser, self._connection.unparsed
        size_before = max(0, len(unparsed) - _PIECE_BYTES)
        while not parser.is_complete and len(unparsed) > size_before:
            if not parser.feed(unparsed, len(unparsed) - size_before):
                break
        if self._is_discarding:
            parser.chunks.clear()
        if parser.chunks or parser.is_complete:
            self._wake()
        if not parser.is_complete and len(unparsed) > 3:
            self.on_data()

    def discard_body(self) -> None:
        """Drop what is left of the body from now on."""
        self._is_discarding = True
        self.on_data()

    def fail_body(self, error: HttpError | None = None) -> None:
        """Have reading the body fail: it has not come in time, or is not what it says."""
        self.keep_alive = False
        self._error = error or HttpError(408, _BODY_TIMEOUT)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the reply ---------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send a part of the reply, and return when the client has read enough of it."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        body = message.get("body", b"")
        self.is_replied = not message.get("more_body", False)
        if self.is_started:
            self._connection.write(body)
        else:
            self.is_started = True
            self._connection.write(self._head(), body)
        await self._connection.drain()

    def _head(self) -> bytes:
        status: int = self._start["status"]
        lines = [_STATUS_LINES[status], *[b"%b: %b\r\n" % each for each in self._start["headers"]]]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self._parser.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


def _length_of(headers: dict[bytes, bytes]) -> int | None:
    # The parser has looked at it.
    length = headers.get(b"content-length")
    return None if length is None else int(length)
