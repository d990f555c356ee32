"""Heads of HTTP/1.1 requests: llhttp parses them, and a head with the same bytes is parsed once for a connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from weightd_gateway.auth import parse_bearer, token_digest
from weightd_gateway.daemon_client import TRACEPARENT, valid_traceparent
from weightd_gateway.http.routes import Route, parse_route
from weightd_protocol.errors import InvalidArgument, Unauthenticated
from weightd_protocol.schema import describe_value

MAX_FIELD_BYTES = 8190
"""Maximum bytes of the request target, and of one header."""

MAX_HEAD_BYTES = 32 * 1024
"""Maximum bytes of the request line and all headers together."""

MAX_HEADERS = 64

HEADER_LENGTH = "Inference-Header-Content-Length"

# Maximum bytes of a head that a connection keeps for its next request.
_MAX_KEPT_BYTES = 2 * 1024

# Maximum bytes of chunk framing for each byte of a chunked body. A chunk of one byte has five bytes of framing.
_MAX_CHUNK_OVERHEAD = 16

_END = b"\r\n\r\n"

_PORT = re.compile(r":[0-9]*$")


class RequestHead:
    """The head of a request. Each property is computed once for all requests of a connection that have this head.

    Args:
        method: the method, such as "GET".
        raw_path: the percent-encoded path below the application's root path, without the query.
        headers: pairs of a lower-case name and a value.

    Attributes:
        method: as above.
        raw_path: as above.
    """

    def __init__(self, method: str, raw_path: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.raw_path = raw_path
        self._headers = headers
        self._first: dict[bytes, bytes] = dict(reversed(headers))

    def header(self, name: bytes) -> str:
        """Return the first value of a header, given its lower-case name; "" if the header is missing."""
        return self._first.get(name, b"").decode("latin-1")

    def header_values(self, name: bytes) -> list[str]:
        """Return all values of a header, given its lower-case name."""
        return [value.decode("latin-1") for each, value in self._headers if each == name]

    @cached_property
    def content_length(self) -> int | None:
        """The length of the body in bytes; None if the client does not send it."""
        length = self._first.get(b"content-length", b"")
        # The server has already validated the value.
        return int(length) if length.strip().isdigit() else None

    @cached_property
    def encoding(self) -> str:
        """The encoding of the body; "" if the client does not send it."""
        return self.header(b"content-encoding").strip().lower()

    @cached_property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body."""
        return self.header(b"expect").lower() == "100-continue"

    @cached_property
    def host(self) -> str:
        """The host that the client has addressed, without the port."""
        return _PORT.sub("", ",".join(self.header_values(b"host"))).lower()

    @cached_property
    def route(self) -> Route:
        """The route of the path.

        Raises:
            NotFound: no route has this path.
        """
        return parse_route(self.raw_path)

    @cached_property
    def traceparent(self) -> str:
        """The traceparent of the request; "" if it is missing or invalid."""
        return valid_traceparent(self.header(TRACEPARENT.encode()))

    @cached_property
    def token_digest(self) -> bytes | None:
        """The digest of the client's access token; None without a token.

        Raises:
            Unauthenticated: the authorization header is invalid.
        """
        authorization = self.header_values(b"authorization")
        if len(authorization) > 1:
            raise Unauthenticated("expected one authorization header")
        return token_digest(parse_bearer(authorization[0])) if authorization else None

    @cached_property
    def json_length(self) -> int | None:
        """The number of JSON bytes at the beginning of the decompressed body; None if the whole body is JSON.

        Raises:
            InvalidArgument: the header is not one number.
        """
        values = self.header_values(HEADER_LENGTH.lower().encode())
        if not values:
            return None
        if len(values) > 1 or not (values[0].isascii() and values[0].isdecimal()) or len(values[0]) > 12:
            raise InvalidArgument(
                f"{HEADER_LENGTH}: expected one number of bytes, got {describe_value(', '.join(values))}"
            )
        return int(values[0])


class ReceivedHead(RequestHead):
    """A head that the gateway's own server has received.

    Args:
        parser: the parser that has parsed the head.

    Attributes:
        keep_alive: whether the client wants to reuse the connection.
        has_body: whether a body follows.
        is_http_1_0: whether the client speaks HTTP/1.0.
    """

    def __init__(self, parser: RequestParser) -> None:
        target = parser.target.partition(b"?")[0]
        super().__init__(parser.method, target.decode("utf-8", "surrogateescape"), parser.headers)
        self.keep_alive = parser.keep_alive
        self.has_body = not parser.is_complete
        self.is_http_1_0 = parser.version == "1.0"


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

    def feed(self, data: bytearray, limit: int = MAX_HEAD_BYTES) -> bytes:
        """Parse the next part of this request, remove it from `data` and return it; return b"" if `data` had no part.

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
            return b""
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
        return taken

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


class HeadReader:
    """Reads the heads of a connection's requests. Clients send the same head repeatedly, which is parsed only once."""

    def __init__(self) -> None:
        self._parser: RequestParser | None = None
        # The last head that arrived in one part and has no chunked body, and its bytes.
        self._last: ReceivedHead | None = None
        self._last_bytes = b""
        self._last_size = 0

    def read(self, data: bytearray) -> tuple[ReceivedHead, RequestParser | None] | None:
        """Remove the head of a request from `data`; return None if the head is incomplete.

        Return the head, and the parser that decodes the body if the body is chunked.

        Raises:
            HttpParserError: the data is not valid HTTP, or a limit is exceeded.
        """
        if self._last is not None and self._parser is None and data.startswith(self._last_bytes):
            del data[: self._last_size]
            return self._last, None
        parser, self._parser = self._parser, None
        first = b""
        if parser is None:
            parser = RequestParser()
            first = parser.feed(data)
        while not parser.is_head_complete:
            first = b""
            if not parser.feed(data):
                self._parser = parser
                return None
        head = ReceivedHead(parser)
        if head.has_body and head.content_length is None:
            return head, parser
        is_kept = len(first) <= _MAX_KEPT_BYTES and first.endswith(_END)
        self._last, self._last_bytes = (head, first) if is_kept else (None, b"")
        self._last_size = len(self._last_bytes)
        return head, None
