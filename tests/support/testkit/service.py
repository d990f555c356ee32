"""A daemon process with workers, started by the command that operators use: `weightd serve CONFIG`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Mapping, Type, TypeVar, cast

from testkit import census, memory, mindir
from weightd import Client, Unavailable, WeightdError
from weightd_protocol.messages.status import GenerationStatus, ProcessStatus, StatusResponse

T = TypeVar("T")

# Model name to its table [models.NAME] of the configuration; only "path" is needed.
Models = Mapping[str, Mapping[str, object]]

LISTEN_LIMIT_S = 30
READY_LIMIT_S = 300  # eight workers that build 192 MiB one after another on a busy machine
STOP_LIMIT_S = 60
# Longer than the daemon and its ZeroMQ proxy take to return unused memory.
REST_S = 2.0
REST_LIMIT_S = 60
STEADY_BYTES = 300_000  # of the whole service
TAIL_LINES = 30


class ServiceError(RuntimeError):
    """Error: the daemon did not reach the awaited state. The text ends with the last lines of its log."""


class Service:
    """A daemon that serves `models` from private directories, which are removed after the block.

        with Service({"mlp": {"path": path, "workers": 2}}) as service, service.client() as client:
            client.infer("mlp", {"x": x})

    A model whose file ends in .mindir uses the project's interpreter with MindSpore Lite. `daemon` extends the table
    [daemon]; `repository` is the table [repository]; `devices` are the tables [devices.NAME]; `groups`, `listeners` and
    `tenants` likewise; `env` is added to the environment of the daemon and its children; `verbose` turns on logs of
    every process. Members of the group `gid` may connect, if it is given. At the start of the block the daemon listens
    and loads the models: requests wait for the load, and `ready` waits for every worker.

    Attributes:
        address: address from which clients choose their transport.
        zmq_address: address for ZeroMQ.
        pid: pid of the daemon.
        begin: time of the start (time.perf_counter).
        cache: directory of the snapshots, page stores and logs of child processes.
    """

    def __init__(
        self,
        models: Models,
        daemon: Mapping[str, object] | None = None,
        *,
        devices: Models | None = None,
        groups: Models | None = None,
        listeners: Models | None = None,
        tenants: Models | None = None,
        repository: Mapping[str, object] | None = None,
        gid: int | None = None,
        env: Mapping[str, str] | None = None,
        verbose: bool = False,
    ) -> None:
        self._models = models
        self._daemon = daemon or {}
        self._devices = devices or {}
        self._groups = groups or {}
        self._listeners = listeners or {}
        self._tenants = tenants or {}
        self._repository = repository
        self._gid = gid
        self._env = {**os.environ, **(env or {})}
        self._verbose = verbose

    def __enter__(self) -> Service:
        # Short, because a socket's path has at most 107 bytes; TMPDIR may be long.
        self._runtime = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
        if self._gid is not None:
            # The sockets get the group of their directory.
            os.chown(self._runtime, -1, self._gid)
            self._runtime.chmod(0o2750)
        # In the repository's build folder, because /tmp may be in memory, where a page store would use memory.
        build = mindir.REPOSITORY / "build"
        build.mkdir(exist_ok=True)
        self.cache = Path(tempfile.mkdtemp(prefix="service-", dir=build))
        self.address = f"{self._runtime}/weightd.sock"
        self.zmq_address = f"ipc://{self.address}"
        try:
            self._start()
        except BaseException:
            self._remove_directories()
            raise
        try:
            self._until(self._listens, LISTEN_LIMIT_S, "listen")
        except BaseException:
            self.__exit__(None)
            raise
        return self

    def __exit__(self, kind: Type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._remove_directories()
        if kind is not None:
            print(f"the log of weightd ends with:\n{self._tail()}", file=sys.stderr)

    @property
    def config(self) -> Path:
        """The path of the configuration file."""
        return self._runtime / "weightd.toml"

    def client(self, timeout: float = 60.0) -> Client:
        """Return a client of this daemon for one thread; the caller closes it."""
        return Client(self.address, timeout=timeout)

    def ready(self, timeout: float = READY_LIMIT_S) -> StatusResponse:
        """Wait until every worker of every model is ready; return that status."""

        def check() -> StatusResponse | None:
            status = self.status()
            models = {model.name: model.generations for model in status.models}
            for name, generations in models.items():
                failed = [each for each in generations if each.state == "failed"]
                if failed:
                    raise ServiceError(f"{name} failed: {failed[-1].reason}")
            ready = {name: sum(map(_ready_workers, generations)) for name, generations in models.items()}
            complete = all(ready[name] == _wanted_workers(table) for name, table in self._models.items())
            return status if complete else None

        return self._until(check, timeout, "have every worker READY")

    def status(self, timeout: float = 60.0) -> StatusResponse:
        """Return the status of the daemon."""
        with self.client(timeout) as client:
            return client.status()

    def processes(self) -> list[ProcessStatus]:
        """Return the holders and workers of all models in the daemon's status."""
        models = self.status().models
        return [process for model in models for generation in model.generations for process in generation.processes]

    def pids(self) -> list[int]:
        """Return the daemon's pid, then the pids of all descendants of the daemon and of its shim."""
        return census.families([self.pid, *(pid for pid in census.shims(self._runtime) if pid != self.pid)])

    def roles(self) -> dict[int, str]:
        """Return the role of each of `pids`: "daemon", "proxy", "fork server", "holder", "worker" and so on."""
        model_roles = {each.pid: each.role for each in self.processes()}
        return {pid: "daemon" if pid == self.pid else model_roles.get(pid) or census.role(pid) for pid in self.pids()}

    def pss_at_rest(self, seconds: float = REST_S) -> dict[int, int]:
        """Return the PSS of each of `pids` in bytes, once processes and memory have not changed for `seconds`."""
        begin = since = time.monotonic()
        last: dict[int, int] = {}
        while True:
            try:
                now = {pid: memory.pss_anonymous(pid) for pid in self.pids()}
                if now.keys() != last.keys() or abs(sum(now.values()) - sum(last.values())) > STEADY_BYTES:
                    last, since = now, time.monotonic()
                if time.monotonic() - since > seconds:
                    return {pid: memory.pss(pid) for pid in now}
            except ProcessLookupError:
                since = time.monotonic()
            if time.monotonic() - begin > REST_LIMIT_S:
                raise ServiceError(f"the memory of the service did not become stable:\n{self._tail()}")
            time.sleep(0.2)

    @property
    def log(self) -> str:
        """The text that the daemon has logged."""
        return "".join(self._log.lines)

    def stop(self, limit: float = STOP_LIMIT_S) -> int:
        """Stop the daemon and return its exit status; kill it after `limit` seconds."""
        return self._end(signal.SIGTERM, limit)

    def start_again(self) -> None:
        """Start the daemon again after it has exited."""
        self._start()

    def kill(self) -> int:
        """Kill the daemon by SIGKILL; the kernel kills its children a moment later."""
        return self._end(signal.SIGKILL, STOP_LIMIT_S)

    def reload(self, models: Models | None = None, tenants: Models | None = None, timeout: float = 60.0) -> None:
        """Reload the daemon with a configuration of these models or tenants."""
        self._models = self._models if models is None else models
        self._tenants = self._tenants if tenants is None else tenants
        self._write()
        with self.client(timeout) as client:
            client.reload()

    def _start(self) -> None:
        self._write()
        self._launch(self.config)

    def _write(self) -> None:
        tables = {"daemon": {**self._directories(), **self._daemon}}
        tables.update((f"models.{name}", _model(table)) for name, table in self._models.items())
        tables.update((f'devices."{name}"', dict(table)) for name, table in self._devices.items())
        tables.update((f"groups.{name}", dict(table)) for name, table in self._groups.items())
        tables.update((f"listeners.{name}", dict(table)) for name, table in self._listeners.items())
        tables.update((f"tenants.{name}", dict(table)) for name, table in self._tenants.items())
        if self._repository is not None:
            tables["repository"] = dict(self._repository)
        self.config.write_text(toml(tables), encoding="utf-8")

    def _launch(self, config: Path) -> None:
        command = [sys.executable, "-m", "weightd_daemon", *(["--verbose"] if self._verbose else [])]
        self.begin = time.perf_counter()
        self._process = self._popen([*command, "serve", str(config)])
        self.pid: int = self._process.pid
        assert self._process.stderr
        self._log = Log(self._process.stderr)

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=self._env)

    def _directories(self) -> dict[str, object]:
        return {"socket": self.zmq_address, "runtime_dir": self._runtime, "cache_dir": self.cache}

    def _remove_directories(self) -> None:
        # The children of a killed daemon may still be writing to their logs.
        shutil.rmtree(self._runtime, ignore_errors=True)
        shutil.rmtree(self.cache, ignore_errors=True)

    def _end(self, number: signal.Signals, limit: float) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._log.finish()
        return status

    def _listens(self) -> bool:
        try:
            self.client().close()
        except Unavailable:
            return False
        return True

    def _until(self, check: Callable[[], T | None], timeout: float, what: str) -> T:
        """Call `check` at first and after each new log line, until its result is true; return that result."""
        deadline = time.monotonic() + timeout
        while True:
            seen = len(self._log.lines)
            try:
                result = check()
            except WeightdError as error:
                raise ServiceError(f"{error}\n{self._tail()}") from error
            if result:
                return result
            if not self._log.wait_beyond(seen, deadline):
                end = f"; it exited with status {self._process.wait()}" if self._log.ended else f" within {timeout} s"
                raise ServiceError(f"weightd did not {what}{end}:\n{self._tail()}")

    def _tail(self) -> str:
        return "".join(self._log.lines[-TAIL_LINES:])


class Log:
    """The lines of a stream, read by a thread; other threads can wait for new lines."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self.ended = False
        self._stream = stream
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_beyond(self, count: int, deadline: float) -> bool:
        """Wait for more than `count` lines; return False at the deadline or the end of the stream."""
        with self._news:
            self._news.wait_for(lambda: len(self.lines) > count or self.ended, deadline - time.monotonic())
            return len(self.lines) > count

    def finish(self) -> None:
        """Read to the end of the stream, once its writer has exited."""
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self.ended = True
            self._news.notify_all()


def _ready_workers(generation: GenerationStatus) -> int:
    return sum(process.role in ("worker", "rank") and process.state == "ready" for process in generation.processes)


def _wanted_workers(table: Mapping[str, object]) -> int:
    """Return the number of workers, or of ranks of all groups."""
    ranks = cast("Mapping[str, Any]", table.get("ranks", {}))
    if ranks:
        groups = cast("list[str | list[str]]", ranks.get("devices", []))
        return ranks.get("size") or sum(1 if isinstance(each, str) else len(each) for each in groups)
    devices = cast("list[str]", table.get("devices", ["cpu"]))
    workers = table.get("workers", 1)
    return cast(int, workers["min"] if isinstance(workers, dict) else workers) * len(devices)


def _model(table: Mapping[str, object]) -> dict[str, object]:
    table = dict(table)
    if str(table.get("path", "")).endswith(".mindir") and "python" not in table:
        table["python"] = mindir.interpreter()
        if table["python"] is None:
            raise ServiceError(mindir.HOW_TO_GET_IT)
    return table


def toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Format tables as TOML, nested tables inline; strings, numbers, booleans and lists look as in JSON."""
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in items.items())} }}"
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
