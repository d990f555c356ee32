"""The daemon of a replica: an embedded one that the replica starts through a supervisor, or the host's service."""

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

# Seconds until the supervisor must have reported the daemon's address. Before that, its interpreter starts, and it
# removes the directories of replicas that were killed.
_START_TIMEOUT_S = 60.0

# Seconds until a supervisor that does not stop is killed: more than it needs to stop the daemon and to remove the
# files.
_STOP_TIMEOUT_S = 15.0

_MAX_REPORT_BYTES = 64 * 1024


class DaemonEndpoint(Protocol):
    """The interface by which a replica starts and stops its daemon."""

    async def start(self) -> str:
        """Start the daemon if necessary; return its address as soon as the address is known.

        Raises:
            FailedPrecondition: the daemon cannot start.
        """
        ...

    async def stop(self) -> None:
        """Stop using the daemon."""
        ...

    @property
    def failure(self) -> str:
        """The reason why the daemon has failed permanently; "" if it has not failed permanently."""
        ...


class HostDaemon:
    """The host's daemon, which the replica neither starts nor stops.

    Args:
        address: the daemon's address.
    """

    failure = ""

    def __init__(self, address: str) -> None:
        self._address = address

    async def start(self) -> str:
        """Return the address."""
        return self._address

    async def stop(self) -> None:
        """Do nothing."""


class EmbeddedDaemon:
    """A daemon that lives as long as this process and leaves no files behind.

    Args:
        base: the directory for the files of replicas.
        models: the model tables of the daemon's configuration.
        on_start: called at each start and restart of the daemon.
    """

    def __init__(self, base: Path, models: Mapping[str, Table], on_start: Callable[[], None]) -> None:
        self._base = base
        self._models = models
        self._on_start = on_start
        self._has_ended = asyncio.Event()
        self._report_task: asyncio.Task[None] | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        # Pid of the supervisor after its fork. As long as the supervisor's report pipe is open, no other process can
        # have this pid.
        self._supervisor_pid = 0
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.failure = ""

    async def start(self) -> str:
        """Start the supervisor and return the address of its daemon."""
        order = daemon_supervisor.encode_order(self._models)
        # The supervisor inherits stderr, so Ray stores its log with the replica's log.
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
            raise FailedPrecondition(
                f"the supervisor of the daemon did not start within {_START_TIMEOUT_S:g} s"
            ) from None

    async def stop(self) -> None:
        """Stop the daemon; return after the supervisor has removed the daemon's files."""
        if self._supervisor is None or self._supervisor.stdin is None:
            return
        # The supervisor stops at the end of file on stdin, which also occurs if this process is killed.
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        try:
            await asyncio.wait_for(self._has_ended.wait(), _STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            # Kill the supervisor, which does not react, for example because it was stopped by SIGSTOP. The kernel then
            # kills the daemon, too, and the next replica on this host removes the files of both.
            if self._supervisor_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._supervisor_pid, signal.SIGKILL)

    @staticmethod
    def _send_order(process: subprocess.Popen[bytes], order: bytes) -> None:
        """Send the order to the started process, and wait until this process has forked the supervisor and exited."""
        assert process.stdin is not None  # noqa: S101 - for the type checkers
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(order)
            process.stdin.flush()
        process.wait()

    async def _read_reports(self, reports: asyncio.StreamReader) -> None:
        """Process the reports of the supervisor until the supervisor exits."""
        try:
            async for line in reports:
                self._on_report(json.loads(line))
        finally:
            self.failure = self.failure or "the supervisor of the daemon has exited"
            if not self._address.done():
                self._address.set_exception(FailedPrecondition(self.failure))
                self._address.exception()  # without this call, asyncio logs an error if no task waits for the address
            self._has_ended.set()

    def _on_report(self, report: Mapping[str, Any]) -> None:
        if "address" in report and not self._address.done():
            self._supervisor_pid = report["pid"]
            self._address.set_result(report["address"])
        if "starts" in report:
            self._on_start()
        self.failure = report.get("failed", self.failure)
