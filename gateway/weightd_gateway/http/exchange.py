"""One HTTP/1.1 request and its response, between the connection and the HTTP API."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from weightd_gateway.http.head import ReceivedHead, RequestParser
from weightd_gateway.http.messages import MAX_COPIED_BYTES, HttpError, HttpReply, HttpRequest

# Bytes of a chunked body that are decoded at a time, which takes a third of a millisecond with the smallest chunks.
_PIECE_BYTES = 2 * 1024

# Maximum bytes of the body that are read at a time if their number is unknown, or if the body is compressed.
_MAX_CHUNK_BYTES = 64 * 1024

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BODY_TIMEOUT = "the body of the request did not arrive in time (receive_timeout)"

_STATUS_LINES = {
    status: f"HTTP/1.1 {status} {phrase}\r\n"
    for status, phrase in [*((each.value, each.phrase) for each in HTTPStatus), (499, "Client Closed Request")]
}


class ExchangeConnection(Protocol):
    """The part of a connection's interface that its exchange uses.

    Attributes:
        unparsed: received bytes that have not been consumed.
        uid: the uid of the peer of a Unix socket; None for other connections.
        common_name: the common name of the client certificate that TLS has verified; None without one.
        is_writable: whether the write buffer has room.
    """

    unparsed: bytearray
    uid: int | None
    common_name: str | None
    is_writable: bool

    def write(self, content: bytes | memoryview) -> None:
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


class HttpExchange(HttpRequest):
    """A request and its response: takes the body from the connection, and sends the response over the connection.

    Args:
        head: the head of the request.
        parser: decodes the body if it is chunked; otherwise None.
        connection: the connection of the request.

    Attributes:
        keep_alive: whether the connection stays open for another request.
        target: the buffer that receives the body directly from the socket; None: data goes to the shared buffer.
        is_replied: whether all of the response has been sent.
    """

    def __init__(self, head: ReceivedHead, parser: RequestParser | None, connection: ExchangeConnection) -> None:
        self.head: ReceivedHead = head
        self.uid = connection.uid
        self.common_name = connection.common_name
        self._parser = parser
        self._connection = connection
        self.keep_alive = head.keep_alive
        self.target: memoryview | None = None
        self.is_replied = False
        # Number of bytes of the body that have not been consumed; not used for a chunked body.
        self._bytes_left = head.content_length or 0 if head.has_body else 0
        self._expects_continue = head.expects_continue
        self._waiter: asyncio.Future[None] | None = None
        self._error: HttpError | None = None
        self._is_discarding = False
        self._is_decoding = False

    @property
    def is_body_complete(self) -> bool:
        """Whether the whole body has been consumed from the received data."""
        return not self._bytes_left if self._parser is None else self._parser.is_complete

    # --- request body ------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """See `HttpRequest.take`."""
        if self._expects_continue:
            self._expects_continue = False
            self._connection.write(_CONTINUE)
        if self._parser is not None:
            body = b"".join(self._parser.chunks)
            self._parser.chunks.clear()
            return body
        unparsed = self._connection.unparsed
        # Leave the bytes of the next request.
        body = bytes(unparsed[: nbytes if nbytes < self._bytes_left else self._bytes_left])
        count = len(body)
        self._bytes_left -= count
        del unparsed[:count]
        return body

    async def read_chunk(self) -> bytes:
        """See `HttpRequest.read_chunk`."""
        while not (body := self.take(_MAX_CHUNK_BYTES)) and not self.is_body_complete:
            await self._wait()
        if self.is_body_complete:
            self._connection.end_body()
        return body

    async def read_into(self, view: memoryview) -> None:
        """See `HttpRequest.read_into`."""
        if len(view) > self._bytes_left:
            raise ValueError("expected no data beyond the end of the body")
        received = self.take(len(view))
        view[: len(received)] = received
        self.target = view[len(received) :] or None
        try:
            while self.target is not None:
                await self._wait()
        finally:
            self.target = None
        if not self._bytes_left:
            self._connection.end_body()

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
        if self._parser is not None:
            if (
                (self._waiter is not None or self._is_discarding)
                and not self._is_decoding
                and self._connection.unparsed
            ):
                self._is_decoding = True
                self._connection.run_fairly(self)
        elif self._is_discarding:
            self.take(self._bytes_left)
        elif self._connection.unparsed:
            self._wake()

    def on_received(self, count: int) -> None:
        """Account for `count` bytes that the connection has received directly into `target`."""
        if self.target is not None:
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
        if parser is None:
            return
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
        self._expects_continue = False
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

    async def send(self, reply: HttpReply) -> None:
        """Send the response. While the write buffer is full, wait until it has room again."""
        head, connection = self._head(reply), self._connection
        try:
            if self.head.method == "HEAD":
                connection.write(head)
            elif reply.body_length <= MAX_COPIED_BYTES:
                connection.write(b"".join((head, *reply.content)))
            else:
                for part in (head, *reply.content):
                    connection.write(part)
                    if not connection.is_writable:
                        await connection.drain()
            self.is_replied = True
            if not connection.is_writable:
                await connection.drain()
        finally:
            reply.release()

    def _head(self, reply: HttpReply) -> bytes:
        fields = f"content-type: {reply.content_type}\r\ncontent-length: {reply.body_length}\r\n"
        for name in reply.headers:
            fields += f"{name}: {reply.headers[name]}\r\n"
        if not self.keep_alive:
            fields += "connection: close\r\n"
        elif self.head.is_http_1_0:
            fields += "connection: keep-alive\r\n"
        return f"{_STATUS_LINES[reply.status]}{fields}\r\n".encode("latin-1")
