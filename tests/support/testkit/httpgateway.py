"""An HTTP gateway in a thread of the test process."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from weightd_common.toml_schema import ErrorCollector
from weightd_gateway.auth import Authenticator
from weightd_gateway.config.load import make_authenticator, parse
from weightd_gateway.context import Gateway
from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.http.connection import HttpConnections
from weightd_gateway.http.server import HttpServer
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.system_shared_memory import RegisteredRegions

T = TypeVar("T")

LIMIT_S = 30.0


class HttpGateway:
    """An HTTP gateway that serves within the block.

    Args:
        daemon: address of the daemon.
        tables: tables of the configuration. Without any, every local client has access, and the port is a free one.
        regions: directory of the files that callers share.

    Attributes:
        port: port of the first address, if it has one.
        gateway: the state that all connections share.
    """

    def __init__(self, daemon: str, tables: Mapping[str, Any] | None = None, regions: Path | None = None) -> None:
        given = dict(tables or {})
        settings = {"daemon": daemon, "http": ["127.0.0.1:0"], "grpc": [], "anonymous": "-"}
        given["gateway"] = {**settings, **given.get("gateway", {})}
        problems = ErrorCollector()
        config = parse(given, Path("/"), problems)
        assert not problems.errors, problems.errors
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        table = config.gateway
        service = DaemonClient(
            table.daemon, table.timeout, AdmissionControl(table.max_in_flight, table.max_memory_bytes)
        )
        shared = RegisteredRegions(enabled=table.shared_memory, **({} if regions is None else {"directory": regions}))
        self.gateway = Gateway(table, make_authenticator(config), service, shared, ParserPool())
        self._rest = HttpServer(self.gateway)

    def __enter__(self) -> HttpGateway:
        self._thread.start()
        addresses = self.run(self._rest.start())
        self.port = int(addresses[0].rpartition(":")[2]) if addresses and "unix:" not in addresses[0] else 0
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._rest.stop(0.0))
        self.run(self.gateway.daemon_client.close())
        self.run(self.gateway.parsers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    @property
    def connections(self) -> HttpConnections:
        """The open connections."""
        return self._rest.connections

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the gateway's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LIMIT_S)

    def become(self, identities: Authenticator) -> None:
        """Replace the authenticator, as a reload does."""
        self.gateway.authenticator = identities

    def ask(
        self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Send one request over a new connection; return status, content and headers of the response.

        Request and response bodies are JSON unless they are bytes.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            body = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            answer = response.read()
            kind = response.headers["Content-Type"]
            return response.status, json.loads(answer) if kind == "application/json" else answer, response.headers
        finally:
            connection.close()
