"""Answers in HTTP, written at once: status, headers and content, with no more copies than a small one takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web

from weightd_gateway.admission_control import Permit
from weightd_gateway.error_codes import retry_after, status_of
from weightd_gateway.tensors import to_json
from weightd_protocol.errors import RequestError, Unauthenticated

JSON = "application/json"
BINARY = "application/octet-stream"

# Below it one copy costs less than another call of the kernel.
_MAX_COPIED_BYTES = 64 * 1024

_REASON_PHRASES = {each.value: each.phrase for each in HTTPStatus} | {499: "Client Closed Request"}

Buffer = bytes | memoryview


class HttpReply:
    """One answer: what aiohttp asks of a response, and no more of it.

    Args:
        content: of it, in pieces that stay as they are until they are written.
        content_type: its media type.
        status: of HTTP.
        headers: more of them, with values that hold no line breaks.
        permit: has the content in it until that is written, or given up.

    Attributes:
        content_type: as above.
        headers: as above; more may be added.
        keep_alive: whether the connection may go on.
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
        self.keep_alive = True
        self.body_length = sum(map(len, content))
        self.content_type = content_type
        self._permit = permit
        self.headers = dict(headers or {})

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write all of it."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller is gone")
        self.keep_alive = self.keep_alive and request.keep_alive
        head = self._header_bytes(request)
        content = () if request.method == "HEAD" else self.content
        if self.body_length <= _MAX_COPIED_BYTES:
            transport.write(b"".join((head, *content)))
        else:
            transport.write(head)
            for each in content:
                transport.write(each)
        # After a small one, too: who asks again and again and reads nothing would have them all kept here.
        await request.writer.drain()

    async def write_eof(self) -> None:
        """Nothing is left to be written."""

    def release(self) -> None:
        """Nothing of it is kept any more."""
        self.content = ()
        if self._permit is not None:
            self._permit.release()

    def _header_bytes(self, request: web.BaseRequest) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status} {_REASON_PHRASES.get(self.status, '')}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {self.body_length}",
        ]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if not self.keep_alive:
            lines.append("Connection: close")
        elif request.version < (1, 1):
            lines.append("Connection: keep-alive")
        return "\r\n".join((*lines, "\r\n")).encode("latin-1")


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return an answer in JSON."""
    return HttpReply([to_json(content).encode()], JSON, status, headers)


def error_reply(error: RequestError, headers: Mapping[str, str] | None = None) -> HttpReply:
    """Return the answer that an error is: always JSON, for Triton's client reads no other."""
    retry_after_s = retry_after(error)
    all_headers = dict(headers or {})
    if retry_after_s is not None:
        all_headers["Retry-After"] = str(retry_after_s)
    if isinstance(error, Unauthenticated):
        all_headers["WWW-Authenticate"] = "Bearer"
    return json_reply({"error": str(error)}, status_of(error).http, all_headers)


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
        self._headers: dict[str, str] = {hdrs.ALLOW: allowed} if allowed else {}

    def reply(self) -> HttpReply:
        """Return the answer; what came late may still come, where the next request is expected."""
        reply = json_reply({"error": str(self)}, self._status, self._headers)
        reply.keep_alive = self._status != HTTPStatus.REQUEST_TIMEOUT
        return reply
