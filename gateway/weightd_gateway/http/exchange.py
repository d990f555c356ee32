"""One HTTP/1.1 request and its response: llhttp parses the request, and ASGI connects it to the application."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from weightd_gateway.http.messages import CONNECTION, HttpError, Message, Scope, ServerConnection

MAX_FIELD_BYTES = 8190
"""Maximum bytes of the request target, and of one header."""

MAX_HEAD_BYTES = 32 * 1024
"""Maximum bytes of the request line and all headers together."""

MAX_HEADERS = 64

# Bytes of a chunked body that are decoded at a time, which takes a third of a millisecond with the smallest chunks.
_PIECE_BYTES = 2 * 1024

# Maximum bytes of chunk framing for each byte of a chunked body. A chunk of one byte has five bytes of framing.
_MAX_CHUNK_OVERHEAD = 16

_END = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BODY_TIMEOUT = "the body of the request did not arrive in time (receive_timeout)"

_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {phrase}\r\n".encode()
    for status, phrase in [*((each.value, each.phrase) for each in HTTPStatus), (499, "Client Closed Request")]
}


class RequestParser:
    """Parses one request: its head and, if the body is chunked, its body. Other bodies bypass this parser.

    Attributes:
        target: the request target.
        headers: pairs of a lower-case name and a value.
        keep_alive: whether the client wants to reuse the connection.
        is_head_complete: whether all headers have been parsed.
        is_complete: whether the parser has parsed the whole request, so that it expects no further data.
        chunks: decoded parts of the body.
    """

    def __init__(self) -> None:
        self._parser: Any = HttpRequestParser(self)
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.keep_alive = False
        self.is_head_complete = False
        self.is_complete = False
        self.chunks: list[bytes] = []
        # Number of bytes that the parser still accepts besides the body: the head, and the framing of chunks. So each
        # decoded byte of the body increases the number.
        self._allowance = MAX_HEAD_BYTES

    @property
    def method(self) -> str:
        """The method of the request."""
        return str(self._parser.get_method(), "ascii")

    @property
    def version(self) -> str:
        """The HTTP version, such as "1.1"."""
        return str(self._parser.get_http_version())

    def feed(self, data: bytearray, limit: int = MAX_HEAD_BYTES) -> bool:
        """Parse the next part of this request and remove it from `data`; return False if `data` had no part.

        A head or a chunked body always ends with an empty line. The parser stops at each empty line, so it never
        consumes bytes of the next request.

        Raises:
            HttpParserError: the data is not valid HTTP, or a limit is exceeded.
        """
        found = data.find(_END, 0, limit)
        if found >= 0:
            size = found + len(_END)
        else:
            # Leave the last bytes in `data` if they may be the beginning of an empty line, whose other bytes have not
            # arrived.
            part = bytes(memoryview(data)[:limit])
            size = max(len(part.rstrip(b"\r\n")), len(part) - len(_END) + 1)
        if not size:
            return False
        self._allowance -= size
        if self._allowance < 0:
            raise HttpParserError(f"expected at most {MAX_HEAD_BYTES} bytes of headers, or of chunk framing")
        taken = bytes(memoryview(data)[:size])
        del data[:size]
        try:
            self._parser.feed_data(taken)
        except HttpParserUpgrade:
            # The client wants to switch to another protocol (the Upgrade header or CONNECT). The server responds in
            # HTTP, and then closes the connection.
            self.keep_alive = False
        return True

    def on_url(self, target: bytes) -> None:  # noqa: D102 - these are httptools' names
        self.target += target
        if len(self.target) > MAX_FIELD_BYTES:
            raise ValueError(f"expected a request target of at most {MAX_FIELD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        if self.is_head_complete:
            return
        if len(self.headers) == MAX_HEADERS or len(name) + len(value) > MAX_FIELD_BYTES:
            raise ValueError(f"expected at most {MAX_HEADERS} headers of at most {MAX_FIELD_BYTES} bytes each")
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
    """The part of a connection's interface that its exchange uses.

    Attributes:
        unparsed: received bytes that have not been consumed.
    """

    unparsed: bytearray

    def write(self, *content: bytes | memoryview) -> None:
        """Send bytes."""
        ...

    async def drain(self) -> None:
        """Wait until the write buffer has room, because the client has read some of the sent bytes."""
        ...

    def begin_body(self) -> None:
        """Notify the connection that the exchange waits for more of the body."""
        ...

    def end_body(self) -> None:
        """Notify the connection that the body is complete."""
        ...

    def run_fairly(self, exchange: HttpExchange) -> None:
        """Call `decode` of the exchange at the peer's turn."""
        ...


class HttpExchange:
    """A request and its response: passes the body to the ASGI application, and the response to the connection.

    Args:
        parser: the parser that has parsed the head.
        connection: the connection of the request.

    Attributes:
        keep_alive: whether the connection stays open for another request.
        target: the buffer that receives the body directly from the socket; None: data goes to the shared buffer.
        is_started: whether a part of the response has been sent.
        is_replied: whether all of the response has been sent.
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
        # Number of bytes of the body that have not been consumed; None for a chunked body and for requests without a
        # body.
        self._bytes_left = None if parser.is_complete else _length_of(headers)
        self._expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._waiter: asyncio.Future[None] | None = None
        self._error: HttpError | None = None
        self._is_discarding = False
        self._is_decoding = False

    @property
    def is_body_complete(self) -> bool:
        """Whether the whole body has been consumed from the received data."""
        return self._parser.is_complete if self._bytes_left is None else not self._bytes_left

    def scope(self) -> Scope:
        """Return the ASGI scope of the request."""
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

    # --- request body ------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """Wait for data of the body and return it as an ASGI message.

        Raises:
            HttpError: the data did not arrive in time, or the body is malformed.
        """
        self._ask_for_body()
        while not (body := self._take()) and not self.is_body_complete:
            await self._wait()
        has_more = not self.is_body_complete
        if not has_more:
            self._connection.end_body()
        return {"type": "http.request", "body": body, "more_body": has_more}

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of a body whose length is known.

        Raises:
            HttpError: the bytes did not arrive in time.
        """
        if self._bytes_left is None or len(view) > self._bytes_left:
            raise ValueError("expected no data beyond the end of the body")
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
        """Remove at most `limit` bytes of the body from the received data, and return them."""
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
        """Process newly received data in the connection's buffer."""
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
        """Account for `count` bytes that the connection has received directly into `target`."""
        if self.target is not None and self._bytes_left is not None:
            self._bytes_left -= count
            self.target = self.target[count:] or None
            if self.target is None:
                self._wake()

    def decode(self) -> None:
        """Decode the next part of a chunked body.

        Raises:
            HttpParserError: the encoding is invalid.
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
        """Drop the rest of the body whenever data arrives."""
        self._is_discarding = True
        self.on_data()

    def fail_body(self, error: HttpError | None = None) -> None:
        """Make reads of the body fail with `error`; the default error says that the body did not arrive in time."""
        self.keep_alive = False
        self._error = error or HttpError(408, _BODY_TIMEOUT)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- response ----------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send a part of the response. If the write buffer is then full, wait until it has room again."""
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
    # The parser has checked that the value is a number.
    length = headers.get(b"content-length")
    return None if length is None else int(length)
