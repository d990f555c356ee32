"""Server of the status page as in the gateway, with numbers that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from weightd_gateway.page.files import FILES, STATUS_HEADERS


class StatusReply(NamedTuple):
    """The reply to a request for status.json."""

    status: int
    body: bytes


class PageServer:
    """An HTTP server with its own port until the end of the block.

    Attributes:
        numbers: receives the header `Authorization` and returns the reply for status.json; a test may replace it.
    """

    def __init__(self, numbers: Callable[[str], StatusReply]) -> None:
        self.numbers = numbers
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/status.json":
                    status, body = page.numbers(self.headers.get("Authorization", ""))
                    self._answer(status, body, {**STATUS_HEADERS, "Content-Type": "application/json"})
                elif self.path in FILES:
                    file = FILES[self.path]
                    self._answer(200, file.body, {**file.headers, "Content-Type": file.content_type})
                else:
                    self.send_error(404)

            def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Return the address of the page."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def stop(self) -> None:
        """Stop the server, as a stopped gateway does. A second call has no effect."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
