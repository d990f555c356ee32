"""Serves metrics over HTTP to Prometheus: one request and one answer a connection, a few seconds, bounded memory.

Anybody may connect. Only the head of a request is read, and the answer to all is one text, which is made at most once a
second, however many ask.
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

# Prometheus sends less than a kilobyte; a proxy in front adds as much.
MAX_HEAD_BYTES = 8192

# Prometheus gives up after ten seconds; what takes longer here than that is no scrape.
TIMEOUT_S = 10.0

# At once: a monitoring system has two, and somebody looks with a browser.
MAX_CONNECTIONS = 32

# Whoever asks sooner gets the same text again.
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
    """An HTTP status, the body, and further header fields."""

    status: int
    body: bytes
    fields: Sequence[str] = ()

    def encode(self) -> bytes:
        """Return the response; the connection ends after it."""
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
    """Return the answer to what is no request for the metrics; None if it is one.

    Args:
        head: of the request, complete.
        is_loopback: whether the exporter listens on loopback addresses alone. A page in a browser of this host can
            connect there, by a name that was made to mean this host: so the request has to call it by an address, or
            localhost.
    """
    line, *fields = head.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(line)
    if request is None:
        return Answer(400, b"expected a request of HTTP/1.1\n")
    method, target = request.groups()
    if target.partition(b"?")[0] != PATH.encode():
        return Answer(404, f"there is only {PATH}\n".encode())
    if method != b"GET":
        return Answer(405, b"expected GET\n", ["Allow: GET"])
    if is_loopback and not _is_this_host(_host_of(fields)):
        return Answer(421, b"expected this host's address, or localhost, as its name\n")
    return None


class MetricsSource:
    """Asks the daemon. A daemon that cannot be reached is an answer, too: it may be there the next time.

    Args:
        connect: connects to it.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._client: Optional[Client] = None

    def fetch(self) -> Answer:
        """Return the metrics, or why there are none."""
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
    """Answers who connects.

    Args:
        fetch: returns the metrics; it may block, and runs in a thread, once at a time.
        is_loopback: see `rejection`.
    """

    def __init__(self, fetch: Callable[[], Answer], *, is_loopback: bool = True) -> None:
        self._fetch = fetch
        self._is_loopback = is_loopback
        self._answer: Optional[asyncio.Future[Answer]] = None
        self._expires_at = 0.0
        # Whose request is not complete, in the order in which they have connected, and all others.
        self._silent: Dict[asyncio.StreamWriter, None] = {}
        self._answered: Dict[asyncio.StreamWriter, None] = {}

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        self._silent[writer] = None
        if len(self._silent) + len(self._answered) > MAX_CONNECTIONS:
            # Who came first and has said nothing goes; else who takes longest to read.
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
        # Nothing more is read: what follows the first request has no answer.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        if head is None:
            answer = Answer(431, f"expected a head of at most {MAX_HEAD_BYTES} bytes\n".encode())
        else:
            answer = rejection(head, is_loopback=self._is_loopback) or await self._metrics()
        # Without a buffer of its own, `drain` waits until the kernel has all of it.
        writer.transport.set_write_buffer_limits(0)
        writer.write(answer.encode())
        await writer.drain()

    async def _metrics(self) -> Answer:
        """Return the metrics of a second ago at most; who asks while they are fetched waits for the same."""
        loop = asyncio.get_event_loop()
        if self._answer is None or (self._answer.done() and loop.time() >= self._expires_at):
            self._answer = loop.run_in_executor(None, self._fetch)
            self._expires_at = loop.time() + MAX_AGE_S
        # Who gives up does not take the others' answer along.
        return await asyncio.shield(self._answer)


async def serve(host: str, port: int, connect: Connect) -> None:
    """Answer who connects to the address, until SIGTERM.

    Raises:
        BadOutput: the address cannot be had.
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
    """What the request calls this host; "" if nothing."""
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
