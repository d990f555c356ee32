"""The gateway process: start, signals, reload and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from weightd_common.service_manager import ServiceManager
from weightd_common.terminal import Terminal
from weightd_gateway import heap_watch
from weightd_gateway.config.load import ConfigError, keys_needing_restart, load
from weightd_gateway.config.schema import GatewayFile
from weightd_gateway.context import Frontend, Gateway

_log = logging.getLogger("weightd.gateway")


class GatewayServer:
    """Runs the frontends until a signal stops the process.

    Args:
        path: the configuration file; SIGHUP reloads it.
        config: the configuration that was loaded from this file.
        gateway: the state that the frontends share; a reload replaces its authenticator.
        frontends: the servers of the configured protocols.
        manager: the connection to the service manager.
    """

    def __init__(
        self, path: Path, config: GatewayFile, gateway: Gateway, frontends: Sequence[Frontend], manager: ServiceManager
    ) -> None:
        self._path = path
        self._config = config
        self._gateway = gateway
        self._frontends = frontends
        self._manager = manager

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the hangup of the terminal, then finish the requests in flight.

        A second SIGTERM or SIGINT ends the process without waiting for these requests.

        Raises:
            OSError: an address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        stop_requested, stop_now = asyncio.Event(), asyncio.Event()

        def stop() -> None:
            (stop_now if stop_requested.is_set() else stop_requested).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        terminal = Terminal()

        def on_hangup() -> None:
            if terminal.has_closed():
                # When a terminal closes, both kernel and shell may send SIGHUP. Therefore a second SIGHUP, unlike a
                # second SIGTERM, does not shorten the shutdown.
                stop_requested.set()
            else:
                self._reload()

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
        _raise_fd_limit()
        heap_watch_task = loop.create_task(heap_watch.watch())
        try:
            await self._start()
            self._manager.notify("READY=1", "STATUS=serving")
            await stop_requested.wait()
            self._manager.notify("STOPPING=1", "STATUS=finishing requests in progress")
            await self._drain(stop_now)
        finally:
            heap_watch_task.cancel()
            await self._gateway.daemon_client.close()
            await self._gateway.parsers.close()

    async def _start(self) -> None:
        for front in self._frontends:
            try:
                urls = await front.start()
            except OSError:
                await self._stop(0.0)
                raise
            for url in urls:
                _log.info("serving at %s", url)

    async def _drain(self, stop_now: asyncio.Event) -> None:
        stop_task = asyncio.create_task(self._stop(self._gateway.config.drain_timeout))
        stop_now_task = asyncio.create_task(stop_now.wait())
        await asyncio.wait([stop_task, stop_now_task], return_when=asyncio.FIRST_COMPLETED)
        if not stop_task.done():
            stop_task.cancel()
            await asyncio.wait([stop_task])
            await self._stop(0.0)
        stop_now_task.cancel()

    async def _stop(self, grace_s: float) -> None:
        await asyncio.gather(*(front.stop(grace_s) for front in self._frontends))

    def _reload(self) -> None:
        """Load the configuration again; apply its tokens, certificates and users to new and open connections."""
        self._manager.notify_reloading()
        try:
            config, authenticator = load(self._path, self._config.gateway.http if self._manager.inherited else ())
        except ConfigError as error:
            for problem in error.problems:
                _log.error("reload failed, configuration unchanged: %s", problem)
        else:
            for key in keys_needing_restart(self._config, config):
                _log.warning("gateway.%s has changed; restart the gateway to apply it", key)
            self._gateway.authenticator = authenticator
            _log.info("configuration reloaded; %d access tokens", len(authenticator.tokens))
        self._manager.notify("READY=1")


def _raise_fd_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit, because each connection needs a descriptor."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
