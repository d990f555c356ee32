"""As much of HTTP/1.1 as it takes to answer one request for one text: bytes in, bytes out."""

from __future__ import annotations

import ipaddress
import re

from weightd_common.exposition import CONTENT_TYPE

PATH = "/metrics"

# Prometheus sends less than a kilobyte; a proxy in front adds as much.
MAX_HEAD_BYTES = 8192

_HEAD_ENDS = (b"\r\n\r\n", b"\n\n")

_REQUEST_LINE = re.compile(rb"([!-~]+) ([!-~]+) HTTP/1\.[0-9]")

_PLAIN_TEXT = "text/plain; charset=utf-8"

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
}


class HttpRequestHead:
    """The head of a request, as it comes in.

    Attributes:
        received: what has come of it; some of what follows it may be there, too.
    """

    def __init__(self) -> None:
        self.received = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take in what has come next; return whether nothing more is needed: it is whole, or too long."""
        searched = max(0, len(self.received) - 3)
        self.received += data
        return self.is_too_long or any(end in self.received[searched:] for end in _HEAD_ENDS)

    @property
    def is_too_long(self) -> bool:
        """Whether it will not be read any further."""
        return len(self.received) > MAX_HEAD_BYTES


def error_response(head: HttpRequestHead, *, is_loopback: bool) -> bytes:
    """Return the answer to what is no request for the metrics; nothing if it is one.

    Args:
        head: of the request.
        is_loopback: whether it has come over the loopback interface. A page in a browser of this host can do that, by a
            name that was made to mean this host: so the request has to call it by an address, or localhost.
    """
    if head.is_too_long:
        return build_response(431, f"expected a head of at most {MAX_HEAD_BYTES} bytes\n".encode())
    line, *fields = [each.rstrip(b"\r") for each in bytes(head.received).split(b"\n")]
    request = _REQUEST_LINE.fullmatch(line)
    if request is None:
        return build_response(400, b"expected a request of HTTP/1.1\n")
    method, target = request.groups()
    if target.partition(b"?")[0] != PATH.encode():
        return build_response(404, f"there is only {PATH}\n".encode())
    if method != b"GET":
        return build_response(405, b"expected GET\n", ["Allow: GET"])
    if is_loopback and not _is_this_host(_parse_host(fields)):
        return build_response(421, b"expected this host's address, or localhost, as its name\n")
    return b""


def build_response(status: int, body: bytes, fields: list[str] | None = None) -> bytes:
    """Return an answer; the connection ends after it."""
    return response_head(status, len(body), fields) + body


def response_head(status: int, length: int, fields: list[str] | None = None) -> bytes:
    """Return the head of an answer whose body has so many bytes."""
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {CONTENT_TYPE if status == 200 else _PLAIN_TEXT}",
        f"Content-Length: {length}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(fields or ()),
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def _parse_host(fields: list[bytes]) -> str:
    """What the request calls this host; "" if nothing."""
    for field in fields:
        name, _, value = field.partition(b":")
        if name.lower() == b"host":
            return value.strip().decode("latin-1")
        if not field:
            break
    return ""


def _is_this_host(name: str) -> bool:
    host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") in ("", "localhost")
    return True
