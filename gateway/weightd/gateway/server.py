"""The process: its fronts from start to stop, and what signals tell it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

from weightd.gateway import heap
from weightd.gateway.config.load import ConfigError, changed, load
from weightd.gateway.config.table import Config
from weightd.gateway.front import Front
from weightd.gateway.gateway import Gateway
from weightd.gateway.manager import Manager
from weightd.shared.terminal import Terminal

_log = logging.getLogger("weightd.gateway")


class Server:
    """Runs fronts until it is told to stop.

    Args:
        path: of the configuration, which SIGHUP has read again.
        config: what it said.
        gateway: what the fronts share; a reload has other identities in it.
        fronts: the protocols.
        manager: the service manager.
    """

    def __init__(self, path: Path, config: Config, gateway: Gateway, fronts: Sequence[Front], manager: Manager) -> None:
        self._path = path
        self._config = config
        self._gateway = gateway
        self._fronts = fronts
        self._manager = manager

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the terminal closes, and then finish what is under way.

        A second SIGTERM or SIGINT waits for nothing.

        Raises:
            OSError: an address cannot be had.
        """
        loop = asyncio.get_running_loop()
        stopped, hurried = asyncio.Event(), asyncio.Event()

        def stop() -> None:
            (hurried if stopped.is_set() else stopped).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        terminal = Terminal()

        def hang_up() -> None:
            if terminal.has_closed():
                # The kernel and the shell may both send it: that is no request to hurry.
                stopped.set()
            else:
                self._reload()

        loop.add_signal_handler(signal.SIGHUP, hang_up)
        _raise_limit()
        watching = loop.create_task(heap.watch())
        try:
            await self._start()
            self._manager.notify("READY=1", "STATUS=serving")
            await stopped.wait()
            self._manager.notify("STOPPING=1", "STATUS=finishing what is under way")
            await self._drain(hurried)
        finally:
            watching.cancel()
            await self._gateway.service.close()
            await self._gateway.helpers.close()

    async def _start(self) -> None:
        for front in self._fronts:
            try:
                places = await front.start()
            except OSError:
                await self._stop(0.0)
                raise
            for place in places:
                _log.info("serving at %s", place)

    async def _drain(self, hurried: asyncio.Event) -> None:
        stopping = asyncio.create_task(self._stop(self._gateway.config.drain_timeout))
        hurry = asyncio.create_task(hurried.wait())
        await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            stopping.cancel()
            await asyncio.wait([stopping])
            await self._stop(0.0)
        hurry.cancel()

    async def _stop(self, grace: float) -> None:
        await asyncio.gather(*(front.stop(grace) for front in self._fronts))

    def _reload(self) -> None:
        """Read the configuration again: who is who holds from now on, for who is connected, too."""
        self._manager.reloading()
        try:
            config, identities = load(self._path, self._config.gateway.http if self._manager.sockets else ())
        except ConfigError as error:
            for problem in error.problems:
                _log.error("the reload changes nothing: %s", problem)
        else:
            for key in changed(self._config, config):
                _log.warning("gateway.%s has changed, which takes a restart", key)
            self._gateway.identities = identities
            _log.info("reloaded: %d tokens", len(identities.tokens))
        self._manager.notify("READY=1")


def _raise_limit() -> None:
    """Have as many descriptors as this process may: each caller is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
