"""A daemon that may be killed and started again, its files, and what it has left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from testkit.manager import Manager
from testkit.mindir import REPOSITORY
from testkit.waiting import until
from weightd.client import Client, RequestError
from weightd.protocol.messages.status import ProcessStatus, StatusResponse

from .resources import Usage, usage

LISTEN_LIMIT_S = 30.0
STOP_LIMIT_S = 60.0
STATUS_LIMIT_S = 5.0
KEEPER_LIMIT_S = 5.0

# After so long without a change connections that end are gone, and the daemon has given back what it holds no more: it
# does so a second after the last large message.
_QUIET_S = 5.0

# What a daemon starts.
_PROGRAMS = (b"weightd.worker", b"weightd.daemon.children.snapshotter", b"keeper/process.py")


class ServiceError(RuntimeError):
    """The daemon did not do what was waited for."""


class Service:
    """`weightd serve` with these tables [daemon] and [models.NAME].

    Where it is `managed`, as systemd does it, its processes outlive a daemon, and the next one goes on with them.

    Attributes:
        workspace: where everything but the sockets is: its log, its cache, and what others put there.
        address: where clients connect.
        workers: how many each model has.
        pid: the daemon's.
        starts: how often it was started.
        managed: whether it is.
    """

    def __init__(
        self,
        workspace: Path,
        daemon: Mapping[str, object],
        models: Mapping[str, Mapping[str, object]],
        *,
        managed: bool = False,
    ) -> None:
        self._daemon = dict(daemon)
        self._models = {name: dict(table) for name, table in models.items()}
        # Short, for the path of a socket has at most 107 bytes.
        self._runtime = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
        self.workspace = workspace
        self.cache = self.workspace / "cache"
        self.cache.mkdir()
        self.address = f"ipc://{self._runtime}/weightd.sock"
        self.workers = {name: int(str(table["workers"])) for name, table in self._models.items()}
        self.starts = 0
        self.pid = 0
        self._client: Client | None = None
        self.managed = managed
        self._manager: Manager | None = None
        if managed:
            self._manager = Manager(self._runtime / "weightd.sock", self._runtime / "notify")
        self.configure({})

    def configure(self, changes: Mapping[str, object], model: str = "") -> None:
        """Write the configuration file, with other settings for a model."""
        if model:
            self._models[model].update(changes)
        places = {"socket": self.address, "runtime_dir": self._runtime, "cache_dir": self.cache}
        lines = ["[daemon]", *_toml({**places, **self._daemon})]
        for name, table in self._models.items():
            lines += [f"[models.{name}]", *_toml(table)]
        written = self._runtime / "weightd.toml.new"
        written.write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.rename(self._config)

    def add(self, model: str, table: Mapping[str, object]) -> None:
        """Write one more model into the configuration file."""
        self._models[model] = dict(table)
        self.workers[model] = int(str(table["workers"]))
        self.configure({})

    def drop(self, model: str) -> None:
        """Write the configuration file without a model."""
        del self._models[model], self.workers[model]
        self.configure({})

    def start(self) -> None:
        """Start the daemon; it listens a moment later."""
        self.starts += 1
        command = [sys.executable, "-m", "weightd.daemon", "serve", str(self._config)]
        with self.log.open("ab") as log:
            if self._manager is not None:
                self._process = self._manager.popen(command, os.environ, stdout=log, stderr=log, start_new_session=True)
            else:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        # Nobody looks at the core files of workers that are killed on purpose.
        resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
        self.pid = self._process.pid

    @property
    def log(self) -> Path:
        """What this daemon writes; each start has a log of its own."""
        return self.workspace / f"weightd.{self.starts}.log"

    def ended(self) -> int | None:
        """Return the daemon's exit status, None while it runs."""
        return self._process.poll()

    @property
    def listens(self) -> bool:
        """Whether the daemon is past its beginning, where it knows no SIGHUP yet."""
        return self.ended() is None and "listens on" in self.log.read_text("utf-8", "replace")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._wait(STOP_LIMIT_S)

    def reload(self) -> None:
        """SIGHUP."""
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> int:
        """SIGTERM; return the exit status."""
        self.hang_up()
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(f"the daemon did not stop within {STOP_LIMIT_S:g} s") from None

    def stop(self) -> int:
        """End the service; return the daemon's exit status."""
        status = self.terminate()
        self._end_manager()
        return status

    def remove(self, *, keep: bool) -> None:
        """Remove the directories, but for the workspace if it is to be kept."""
        self.hang_up()
        if self._process.poll() is None:
            self.kill()
        self._end_manager()
        if keep:
            with contextlib.suppress(OSError):
                shutil.copy(self._config, self.workspace)
        else:
            shutil.rmtree(self.workspace, ignore_errors=True)
        shutil.rmtree(self._runtime, ignore_errors=True)

    def keep_logs(self) -> None:
        """Copy the logs of the children that are there now, for the daemon removes them."""
        target = self.workspace / "children"
        target.mkdir(exist_ok=True)
        for log in self.cache.rglob("*.log"):
            with contextlib.suppress(OSError):
                shutil.copy(log, target / f"{log.parent.name}-{log.name}")

    def _wait(self, limit: float) -> int:
        status = self._process.wait(limit)
        if self._manager is not None:
            self._manager.hear_out()
        return status

    def _end_manager(self) -> None:
        """What it has kept is closed: that ends the keeper and all that is left."""
        if self._manager is None:
            return
        self._manager.close()
        self._manager = None
        until(lambda: not self.children(), "the processes end with the service", KEEPER_LIMIT_S)
        for path in (self._runtime / "weightd.sock", self._runtime / "notify"):
            path.unlink()

    # --- what it tells ------------------------------------------------------------------------------------------

    def status(self) -> StatusResponse:
        """What the daemon says about itself.

        Raises:
            RequestError: it says nothing.
        """
        if self._client is None:
            self._client = Client(self.address, timeout=STATUS_LIMIT_S)
        return self._client.status()

    def hang_up(self) -> None:
        """Close the connection that `status` uses."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def await_health(self, limit: float) -> StatusResponse:
        """Wait until every model has all of its workers; return the status that says so."""

        def check() -> StatusResponse | None:
            if self.ended() is not None:
                raise ServiceError(f"the daemon has ended with status {self.ended()}")
            try:
                status = self.status()
            except RequestError:
                return None
            return None if self.unhealthy(status) else status

        return until(check, "every model has all of its workers", limit)

    def in_quiet(self, limit: float) -> Usage:
        """Wait until nobody asks and nothing moves; return what the daemon holds then."""
        self.await_health(limit)
        moved_at, last = time.monotonic(), (0, 0)

        def steady() -> Usage | None:
            nonlocal moved_at, last
            now = usage(self.pid)
            holds = (now.fds, now.threads)
            if holds != last or any(model.queued for model in self.status().models):
                moved_at, last = time.monotonic(), holds
            return now if time.monotonic() - moved_at > _QUIET_S else None

        return until(steady, "the daemon is quiet", limit)

    def unhealthy(self, status: StatusResponse) -> list[str]:
        """Return the models that do not serve with all of their workers."""
        full = {
            model.name
            for model in status.models
            if model.state == "serving" and len(ready_workers(status, model.name)) == self.workers[model.name]
        }
        return sorted(set(self.workers) - full)

    # --- from outside -------------------------------------------------------------------------------------------

    def children(self) -> set[int]:
        """Return the processes whose command line shows that this daemon, or one before it, has started them."""
        found: set[int] = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                ours = os.fsencode(self._runtime) in line or os.fsencode(self.cache) in line
                if ours and any(program in line for program in _PROGRAMS):
                    found.add(int(entry.name))
        return found

    def left_behind(self) -> list[str]:
        """Return the files that a daemon has in its directories, but for its configuration."""
        paths = [*self._runtime.rglob("*"), *self.cache.rglob("*")]
        return sorted(str(path) for path in paths if path != self._config)

    def store(self, generation: str) -> Path | None:
        """Return the page store of a generation."""
        return next(self.cache.glob(f"*/{generation}/pages"), None)

    @property
    def _config(self) -> Path:
        return self._runtime / "weightd.toml"


class Watched:
    """Processes, watched by pidfds: a pid that is used again cannot deceive."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._pidfds[pid] = os.pidfd_open(pid)

    def survivors(self, limit: float = 0.0) -> list[int]:
        """Return those that still run, after at most so many seconds for each."""
        return [pid for pid, pidfd in self._pidfds.items() if not select.select([pidfd], [], [], limit)[0]]

    def close(self) -> None:
        """Watch no longer."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()


def processes(status: StatusResponse, model: str) -> list[ProcessStatus]:
    """Return the processes of every generation of a model."""
    return [
        process
        for each in status.models
        if each.name == model
        for generation in each.generations
        for process in generation.processes
    ]


def ready_workers(status: StatusResponse, model: str) -> list[ProcessStatus]:
    """Return the workers of the generation that serves."""
    return [
        process
        for each in status.models
        if each.name == model
        for generation in each.generations
        if generation.state == "serving"
        for process in generation.processes
        if process.role == "worker" and process.state == "ready"
    ]


def workspace(prefix: str) -> Path:
    """Return a new directory among the repository's builds: /tmp may be a memory file system."""
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=build))


def _toml(table: Mapping[str, object]) -> list[str]:
    """Text and numbers are written in TOML as in JSON."""
    return [f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}" for key, value in table.items()]
