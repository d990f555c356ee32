"""HTTP server for Prometheus with the only path `/metrics`, bounded memory, and one request per connection.

The server has no authentication. It reads only the head of a request. All clients get the same text, which the server
creates at most once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import signal
import sys
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence

from weightctl.command import BadOutput, Connect
from weightctl.text import clean
from weightd.client import Client
from weightd_common.exposition import CONTENT_TYPE, exposition
from weightd_protocol.errors import WeightdError

PATH = "/metrics"

# Maximum size of a request's head in bytes. Prometheus sends less than a kilobyte; a proxy in front of the exporter may
# add as much.
MAX_HEAD_BYTES = 8192

# Maximum duration of a connection in seconds. Prometheus gives up after ten seconds, so a connection that lasts longer
# is not a scrape.
TIMEOUT_S = 10.0

# Maximum number of concurrent connections. A monitoring system opens about two, and sometimes there is a browser.
MAX_CONNECTIONS = 32

# Number of seconds for which the server returns the same text again.
MAX_AGE_S = 1.0

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/1\.[0-9]")

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Answer(NamedTuple):
    """An HTTP response: status code, body and additional header fields."""

    status: int
    body: bytes
    fields: Sequence[str] = ()

    def encode(self) -> bytes:
        """Return the bytes of the response. The response announces that the server then closes the connection."""
        lines = [
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}",
            f"Content-Type: {CONTENT_TYPE if self.status == 200 else 'text/plain; charset=utf-8'}",
            f"Content-Length: {len(self.body)}",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *self.fields,
        ]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode() + self.body


def rejection(head: bytes, *, is_loopback: bool) -> Optional[Answer]:
    """Return an error response to an invalid request. Return None if the request is valid.

    Args:
        head: the complete head of the request: request line and header fields.
        is_loopback: whether the exporter listens only on loopback. In this case the Host header must be an address or
            localhost. Otherwise a web page could read the metrics by DNS rebinding: with a host name that resolves to
            loopback.
    """
    line, *fields = head.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(line)
    if request is None:
        return Answer(400, b"expected an HTTP/1.1 request\n")
    method, target = request.groups()
    if target.partition(b"?")[0] != PATH.encode():
        return Answer(404, f"not found; the only path is {PATH}\n".encode())
    if method != b"GET":
        return Answer(405, b"expected GET\n", ["Allow: GET"])
    if is_loopback and not _is_this_host(_host_of(fields)):
        return Answer(421, b"expected an address of this host, or localhost, in the Host header\n")
    return None


class MetricsSource:
    """Fetches metrics from the daemon. After a failure, the next `fetch` connects to the daemon again.

    Args:
        connect: a function that connects to the daemon.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: Optional[Client] = None

    def fetch(self) -> Answer:
        """Return a response with the metrics, or an error response if the daemon does not provide them."""
        try:
            if self._client is None:
                self._client = self._connect()
            return Answer(200, exposition(self._client.metrics()).encode())
        except WeightdError as error:
            self.close()
            return Answer(503, f"{clean(str(error))}\n".encode())

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
            self._client = None


class Exporter:
    """Serves the connections of the HTTP server.

    Args:
        fetch: a function that returns the metrics. It may block, so it is called in a thread, but never twice at the
            same time.
        is_loopback: whether the exporter listens only on loopback, see `rejection`.
    """

    def __init__(self, fetch: Callable[[], Answer], *, is_loopback: bool = True) -> None:
        self._fetch = fetch
        self._is_loopback = is_loopback
        self._answer: Optional[asyncio.Future[Answer]] = None
        self._expires_at = 0.0
        # Open connections, oldest first: `_silent` contains the connections whose request is incomplete, `_answered`
        # all others.
        self._silent: Dict[asyncio.StreamWriter, None] = {}
        self._answered: Dict[asyncio.StreamWriter, None] = {}

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it is closed. If there are too many connections, close one."""
        self._silent[writer] = None
        if len(self._silent) + len(self._answered) > MAX_CONNECTIONS:
            # Close the oldest connection whose request is incomplete. If there is no other, close the oldest connection
            # to which a response is being sent.
            next(iter(self._silent if len(self._silent) > 1 else self._answered)).transport.abort()
        try:
            await asyncio.wait_for(self._serve(reader, writer), TIMEOUT_S)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            writer.transport.abort()
        finally:
            self._silent.pop(writer, None)
            self._answered.pop(writer, None)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head: Optional[bytes] = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = None
        self._answered[writer] = self._silent.pop(writer)
        # Stop reading: the server answers only the first request of a connection.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        if head is None:
            answer = Answer(431, f"expected request headers of at most {MAX_HEAD_BYTES} bytes\n".encode())
        else:
            answer = rejection(head, is_loopback=self._is_loopback) or await self._metrics()
        # Make `drain` wait until the kernel has accepted all bytes, instead of leaving some in asyncio's buffer.
        writer.transport.set_write_buffer_limits(0)
        writer.write(answer.encode())
        await writer.drain()

    async def _metrics(self) -> Answer:
        """Return metrics that were fetched within the last second. Concurrent requests share one fetch."""
        loop = asyncio.get_event_loop()
        if self._answer is None or (self._answer.done() and loop.time() >= self._expires_at):
            self._answer = loop.run_in_executor(None, self._fetch)
            self._expires_at = loop.time() + MAX_AGE_S
        # Shield the fetch: a client that disconnects must not cancel it, because other clients may be waiting for it.
        return await asyncio.shield(self._answer)


async def serve(host: str, port: int, connect: Connect) -> None:
    """Serve metrics at `host` and `port` until SIGTERM.

    Raises:
        BadOutput: the server cannot listen at this address.
    """
    source = MetricsSource(connect)
    is_loopback = _is_loopback(host)
    exporter = Exporter(source.fetch, is_loopback=is_loopback)
    try:
        server = await asyncio.start_server(exporter.on_connection, host, port, limit=MAX_HEAD_BYTES)
    except OSError as error:
        raise BadOutput(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    print(f"weightctl: metrics at http://{_bracketed(host)}:{port}{PATH}", file=sys.stderr)
    if not is_loopback:
        print("weightctl: warning: any client that reaches this address can read the metrics", file=sys.stderr)
    stopped = asyncio.Event()
    asyncio.get_event_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        await stopped.wait()
    finally:
        server.close()
        source.close()


def _host_of(fields: Iterable[bytes]) -> str:
    """Return the value of the Host header, or "" if there is no Host header."""
    named: List[bytes] = [each.partition(b":")[2] for each in fields if each.lower().startswith(b"host:")]
    return named[0].strip().decode("latin-1") if named else ""


def _is_this_host(name: str) -> bool:
    host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return host == "" or _is_address(host) or host.lower().rstrip(".") == "localhost"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
