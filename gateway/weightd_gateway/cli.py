"""The command `weightd gateway`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from pathlib import Path

from weightd_common import commandline
from weightd_common.commandline import Parser
from weightd_common.process_start import disable_core_dumps
from weightd_common.service_manager import CLIENTS, SEND_TIMEOUT_S, ServiceManager
from weightd_gateway import heap_watch, logs
from weightd_gateway.config import addresses
from weightd_gateway.config.load import ConfigError, default_path, load
from weightd_gateway.context import Frontend, Gateway
from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.fairness import AdmissionControl
from weightd_gateway.parser_process import ParserPool
from weightd_gateway.server import GatewayServer
from weightd_gateway.system_shared_memory import RegisteredRegions

OK = 0
CANNOT_CREATE = 73  # EX_CANTCREAT: an address cannot be bound
CONFIG = 78  # EX_CONFIG: the configuration is invalid; a restart would fail in the same way


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    disable_core_dumps()
    heap_watch.set_up()
    logs.set_up(logging.DEBUG if options.verbose else logging.INFO)
    path = (Path(options.config) if options.config else default_path()).absolute()
    manager = ServiceManager(os.environ, notify_timeout_s=SEND_TIMEOUT_S)
    sockets = [socket.socket(fileno=each) for each in manager.inherited.get(CLIENTS, ())]
    try:
        config, authenticator = load(path, [str(addresses.address_of(each)) for each in sockets])
    except ConfigError as error:
        for problem in error.problems:
            logs.print_error(problem)
        return CONFIG
    if options.check:
        print(f"{path}: valid")
        return OK
    settings = config.gateway
    admission = AdmissionControl(settings.max_in_flight, settings.max_memory_bytes)
    daemon_client = DaemonClient(settings.daemon or None, settings.timeout, admission)
    gateway = Gateway(
        settings,
        authenticator,
        daemon_client,
        RegisteredRegions(enabled=settings.shared_memory),
        ParserPool(),
        sockets,
    )
    try:
        frontends = _make_frontends(gateway)
    except ImportError as error:
        logs.print_error(f"{error}; install the gateway's dependencies: `pip install './weightd[gateway]'`")
        return CONFIG
    try:
        asyncio.run(GatewayServer(path, config, gateway, frontends, manager).run())
    except OSError as error:
        logs.print_error(error.strerror or str(error))
        return CANNOT_CREATE
    return OK


def _make_frontends(gateway: Gateway) -> list[Frontend]:
    """Return the servers of the configured protocols (HTTP, gRPC); libraries of other protocols are not imported.

    Raises:
        ImportError: a library is not installed.
    """
    frontends: list[Frontend] = []
    if gateway.config.http_addresses:
        from weightd_gateway.http.server import HttpServer  # noqa: PLC0415 - the import takes 20 MB of memory

        frontends.append(HttpServer(gateway))
    if gateway.config.grpc_addresses:
        from weightd_gateway.grpc.server import GrpcServer  # noqa: PLC0415 - the import takes 20 MB of memory

        frontends.append(GrpcServer(gateway))
    return frontends


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = Parser(prog="weightd gateway")
    parser.add_argument("-v", "--verbose", action="store_true", help="log each request")
    commandline.add_gateway_arguments(parser)
    return parser
