"""A daemon that may be killed and started again, its files, and a check for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from testkit import census
from testkit.manager import Manager
from testkit.mindir import REPOSITORY
from testkit.waiting import until
from weightd import Client, RequestError
from weightd_protocol.messages.status import GenerationStatus, ProcessStatus, StatusResponse

from . import guests
from .resources import Usage, usage

STOP_LIMIT_S = 60.0
STATUS_LIMIT_S = 5.0
KEEPER_LIMIT_S = 5.0

# After this time without a change, closed connections are gone and the daemon has freed unused memory, which it does
# one second after the last large message.
_QUIET_S = 5.0

# Log lines that show no problem.
_ROUTINE = re.compile(r"\S+ \S+ (INFO|DEBUG) ")

# Programs that a daemon starts.
_PROGRAMS = (b"weightd_worker", b"weightd_daemon.processes.snapshotter", census.SHIM_MARK)

Table = Mapping[str, object]


class ServiceError(RuntimeError):
    """Error: the daemon did not reach the awaited state."""


class Service:
    """`weightd serve` with these tables [daemon] and [models.NAME].

    If it is `managed`, as by systemd, its processes outlive a daemon, and the next daemon adopts them.

    Attributes:
        workspace: directory of all files but the sockets: logs, cache and files of tests.
        address: address from which clients choose their transport.
        unix_address: address of the daemon's Unix socket.
        zmq_address: address of the ZeroMQ proxy.
        pid: pid of the daemon.
        managed: whether a service manager keeps sockets and descriptors.
    """

    def __init__(self, workspace: Path, daemon: Table, models: Mapping[str, Table], *, managed: bool = False) -> None:
        # Short, because the path of a socket has at most 107 bytes.
        self._runtime = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
        self.workspace = workspace
        self.cache = workspace / "cache"
        self.cache.mkdir()
        self.address = f"{self._runtime}/weightd.sock"
        self.unix_address = f"unix://{self.address}"
        self.zmq_address = f"ipc://{self.address}"
        places = {"socket": self.zmq_address, "runtime_dir": self._runtime, "cache_dir": self.cache}
        self._daemon = {**places, **daemon}
        self._models = dict(models)
        self._config = self._runtime / "weightd.toml"
        self._starts = 0
        self.pid = 0
        self._client: Client | None = None
        self.managed = managed
        self._manager = Manager(self._runtime / "weightd.sock", self._runtime / "notify") if managed else None
        self._write()

    def configure(self, model: str, changes: Table) -> None:
        """Write the configuration file with changed settings of a model, or with a new model."""
        self._models[model] = {**self._models.get(model, {}), **changes}
        self._write()

    def limit_memory(self, nbytes: int) -> None:
        """Write the configuration file with this budget for models."""
        self._daemon["max_model_bytes"] = nbytes
        self._write()

    def drop(self, model: str) -> None:
        """Write the configuration file without a model."""
        del self._models[model]
        self._write()

    def _write(self) -> None:
        lines = ["[daemon]", *_toml(self._daemon)]
        for name, table in self._models.items():
            lines += [f"[models.{name}]", *_toml(table)]
        written = self._runtime / "weightd.toml.new"
        written.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.rename(self._config)

    def start(self) -> None:
        """Start the daemon; it listens a moment later."""
        self._starts += 1
        command = [sys.executable, "-m", "weightd_daemon", "serve", str(self._config)]
        with self.log.open("ab") as log:
            if self._manager is not None:
                self._process = self._manager.popen(command, os.environ, stdout=log, stderr=log, start_new_session=True)
            else:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        # Workers that crash on purpose need no core files.
        resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
        self.pid = self._process.pid

    @property
    def log(self) -> Path:
        """The path of the log of this daemon; each start has a separate log."""
        return self.workspace / f"weightd.{self._starts}.log"

    def warnings(self) -> list[str]:
        """Return warnings and errors of all daemons, and all output that is no log line."""
        return [
            f"{number}: {line}"
            for number, log in enumerate(self.logs(), 1)
            for line in log.splitlines()
            if not _ROUTINE.match(line)
        ]

    def logs(self) -> Iterator[str]:
        """Yield the log of each daemon."""
        for number in range(1, self._starts + 1):
            yield (self.workspace / f"weightd.{number}.log").read_text("utf-8", "replace")

    def ended(self) -> int | None:
        """Return the daemon's exit status, None while it runs."""
        return self._process.poll()

    @property
    def listens(self) -> bool:
        """Whether the daemon has started so far that it handles SIGHUP."""
        return self.ended() is None and "listens on" in self.log.read_text("utf-8", "replace")

    def kill(self) -> None:
        """Kill the daemon by SIGKILL."""
        self._process.kill()
        self._wait()

    def reload(self) -> None:
        """Send SIGHUP to the daemon."""
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> int:
        """Stop the daemon by SIGTERM; return its exit status."""
        self.hang_up()
        self._process.terminate()
        try:
            return self._wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(f"the daemon did not stop within {STOP_LIMIT_S:g} s") from None

    def stop(self) -> int:
        """Stop the service; return the daemon's exit status."""
        status = self.terminate()
        self._end_manager()
        return status

    def remove(self, *, keep: bool) -> None:
        """Remove the directories; keep the workspace if asked to."""
        self.hang_up()
        if self.ended() is None:
            self.kill()
        self._end_manager()
        if keep:
            shutil.copy(self._config, self.workspace)
        else:
            shutil.rmtree(self.workspace, ignore_errors=True)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def keep_logs(self) -> None:
        """Copy the current logs of the children, because the daemon removes them."""
        target = self.workspace / "children"
        target.mkdir(exist_ok=True)
        for log in self.cache.rglob("*.log"):
            with contextlib.suppress(OSError):
                shutil.copy(log, target / f"{log.parent.name}-{log.name}")

    def _wait(self) -> int:
        status = self._process.wait(STOP_LIMIT_S)
        if self._manager is not None:
            self._manager.drain_notifications()
        return status

    def _end_manager(self) -> None:
        """Close the stored descriptors, which ends the shim and all remaining processes."""
        if self._manager is None:
            return
        self._manager.close()
        self._manager = None
        until(lambda: not self.children(), "the processes end with the service", KEEPER_LIMIT_S)
        for name in ("weightd.sock", "weightd.sock.unix", "notify"):
            (self._runtime / name).unlink()

    # --- status -------------------------------------------------------------------------------------------------

    def status(self) -> StatusResponse:
        """Return the status of the daemon.

        Raises:
            RequestError: the daemon does not reply.
        """
        if self._client is None:
            self._client = Client(self.address, timeout=STATUS_LIMIT_S)
        return self._client.status()

    def hang_up(self) -> None:
        """Close the connection that `status` uses."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def await_health(self, limit: float) -> None:
        """Wait until every model has all of its workers."""

        def check() -> bool:
            if self.ended() is not None:
                raise ServiceError(f"the daemon exited with status {self.ended()}")
            try:
                return not self.unhealthy(self.status())
            except RequestError:
                return False

        until(check, "every model has all of its workers", limit)

    def in_quiet(self, limit: float) -> dict[str, Usage]:
        """Wait until the service is idle; return the resource use of the daemon, its zygote and its proxy."""
        self.await_health(limit)
        moved_at, last = time.monotonic(), [(0, 0)]

        def steady() -> dict[str, Usage] | None:
            nonlocal moved_at, last
            now = {name: usage(pid) for name, pid in self.front().items()}
            holds = [(each.fds, each.threads) for each in now.values()]
            if holds != last or any(model.queued for model in self.status().models):
                moved_at, last = time.monotonic(), holds
            return now if time.monotonic() - moved_at > _QUIET_S else None

        return until(steady, "the daemon is quiet", limit)

    def unhealthy(self, status: StatusResponse) -> list[str]:
        """Return the models without all of their workers, and "proxy" if the proxy is missing."""
        states = {model.name: model.state for model in status.models}
        models = [
            name
            for name, table in self._models.items()
            # The daemon loads and evicts guests all the time.
            if not (table.get("load") == "on_demand" and states[name] == "unloaded")
            and not (name in guests.NAMES and states[name] != "failed")
            and (states[name] != "serving" or len(ready_workers(status, name)) != _workers(table))
        ]
        return sorted(models) + ["proxy"] * ("proxy" not in self.front())

    # --- processes and files ------------------------------------------------------------------------------------

    def children(self) -> set[int]:
        """Return the processes of this daemon and of earlier ones, found by the paths of their logs."""
        found = {pid for name, pid in self.front().items() if name != "daemon"}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                ours = census.log(int(entry.name)).startswith((f"{self._runtime}/", f"{self.cache}/"))
                if ours and any(program in line for program in _PROGRAMS):
                    found.add(int(entry.name))
        return found

    def front(self) -> dict[str, int]:
        """Return the running processes among the daemon, its zygote and its proxy."""
        found = {"daemon": self.pid}
        for name, parent, comm in (("zygote", "daemon", "weightd-zygote"), ("proxy", "zygote", "zmq-proxy ")):
            for pid in _children(found[parent], comm) if parent in found else ():
                found[name] = pid
        return found

    def left_behind(self) -> list[str]:
        """Return the files that a daemon has left in its directories, except configuration and counters."""
        paths = [*self._runtime.rglob("*"), *self.cache.rglob("*")]
        return sorted(str(path) for path in paths if path != self._config and path.suffix != ".counters")

    def store(self, generation: str) -> Path | None:
        """Return the page store of a generation."""
        return next(self.cache.glob(f"*/{generation}/pages"), None)


def _children(parent: int, name: str) -> list[int]:
    """Return the children of a process whose names begin with `name`."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            head, _, rest = (entry / "stat").read_text("utf-8", "replace").rpartition(")")
            if int(rest.split()[1]) == parent and head.partition("(")[2].startswith(name):
                found.append(int(entry.name))
    return found


class Watched:
    """Processes watched by pidfd, so that a reused pid is not mistaken for one of them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)

    def survivors(self, limit: float = 0.0) -> list[int]:
        """Return the processes that still run after at most `limit` seconds each, and stop watching."""
        running = [pid for pid, pidfd in self._pidfds.items() if not select.select([pidfd], [], [], limit)[0]]
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
        return running


def generations(status: StatusResponse, model: str) -> list[GenerationStatus]:
    """Return every generation of a model."""
    return [generation for each in status.models if each.name == model for generation in each.generations]


def processes(status: StatusResponse, model: str) -> list[ProcessStatus]:
    """Return the processes of every generation of a model."""
    return [process for generation in generations(status, model) for process in generation.processes]


def ready_workers(status: StatusResponse, model: str) -> list[ProcessStatus]:
    """Return the workers or ranks of the serving generation."""
    serving = [generation for generation in generations(status, model) if generation.state == "serving"]
    there = [process for generation in serving for process in generation.processes]
    return [process for process in there if process.role in ("worker", "rank") and process.state == "ready"]


def workspace(prefix: str) -> Path:
    """Create a directory in the repository's build folder, because /tmp may be in memory."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=build))


def _workers(table: Table) -> int:
    """Return the number of processes of a model that serve requests."""
    devices = cast("list[str]", table.get("ranks.devices", []))
    return len(devices) or cast(int, table["workers"])


def _toml(table: Table) -> list[str]:
    """Format a table as TOML; strings and numbers look the same in TOML and JSON."""
    return [f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}" for key, value in table.items()]
