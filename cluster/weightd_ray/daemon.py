"""The daemon that a replica asks: one of its own, with a guard between, or the host's service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from weightd_protocol.errors import FailedPrecondition
from weightd_ray import daemon_supervisor
from weightd_ray.daemon_supervisor import Table

# An interpreter starts, and what killed replicas have left is removed.
_START_TIMEOUT_S = 60.0

# The guard's own patience with a daemon, and the files.
_STOP_TIMEOUT_S = 15.0

_MAX_REPORT_BYTES = 64 * 1024


class DaemonEndpoint(Protocol):
    """Where a replica's requests go."""

    async def start(self) -> str:
        """Return its address, as soon as it is known.

        Raises:
            FailedPrecondition: there will be none.
        """
        ...

    async def stop(self) -> None:
        """Ask nothing of it any more."""
        ...

    @property
    def failure(self) -> str:
        """Why there is none any more, and will be none; "" as long as that is not so."""
        ...


class HostDaemon:
    """The host's own, which others start and end.

    Args:
        address: of it.
    """

    failure = ""

    def __init__(self, address: str) -> None:
        self._address = address

    async def start(self) -> str:
        """As Daemon."""
        return self._address

    async def stop(self) -> None:
        """As Daemon."""


class EmbeddedDaemon:
    """A daemon that lives as long as this process, and leaves nothing behind.

    Args:
        base: the directory for the files of replicas.
        models: the tables of its configuration.
        on_start: is called when it starts, and each time that it starts again.
    """

    def __init__(self, base: Path, models: Mapping[str, Table], on_start: Callable[[], None]) -> None:
        self._base = base
        self._models = models
        self._on_start = on_start
        self._has_ended = asyncio.Event()
        self._report_task: asyncio.Task[None] | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        # Of what was left alone; it cannot be another's as long as its end of the reports is open.
        self._supervisor_pid = 0
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failure = ""

    async def start(self) -> str:
        """As Daemon."""
        order = daemon_supervisor.encode_order(self._models)
        # What it writes goes where this process writes: Ray keeps that with the replica's log.
        self._supervisor = process = subprocess.Popen(
            daemon_supervisor.supervisor_command(self._base), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        loop = asyncio.get_running_loop()
        reports = asyncio.StreamReader(_MAX_REPORT_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), cast("Any", process.stdout))
        self._report_task = asyncio.create_task(self._read_reports(reports))
        await loop.run_in_executor(None, self._send_order, process, order)
        try:
            return await asyncio.wait_for(asyncio.shield(self._address), _START_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise FailedPrecondition(f"the guard of the daemon has not begun within {_START_TIMEOUT_S:g} s") from None

    async def stop(self) -> None:
        """End it, and return when nothing of it is left."""
        if self._supervisor is None or self._supervisor.stdin is None:
            return
        # The end of file is what the guard waits for; it comes as well if this process is killed.
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        try:
            await asyncio.wait_for(self._has_ended.wait(), _STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            # Somebody has stopped it: the kernel ends the daemon with it, and the next replica removes the files.
            if self._supervisor_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._supervisor_pid, signal.SIGKILL)

    @staticmethod
    def _send_order(process: subprocess.Popen[bytes], order: bytes) -> None:
        """Tell the guard what to do; what was started leaves it alone at once, and is no more."""
        assert process.stdin is not None  # noqa: S101 - for the checkers
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(order)
            process.stdin.flush()
        process.wait()

    async def _read_reports(self, reports: asyncio.StreamReader) -> None:
        """Take in what the guard says, to its end."""
        try:
            async for line in reports:
                self._on_report(json.loads(line))
        finally:
            self.failure = self.failure or "the guard of the daemon has ended"
            if not self._address.done():
                self._address.set_exception(FailedPrecondition(self.failure))
                self._address.exception()  # it may be that nobody waits for it
            self._has_ended.set()

    def _on_report(self, report: Mapping[str, Any]) -> None:
        if "address" in report and not self._address.done():
            self._supervisor_pid = report["pid"]
            self._address.set_result(report["address"])
        if "starts" in report:
            self._on_start()
        self.failure = report.get("failed", self.failure)
