"""Helpers of the end-to-end tests: models, reference answers, request load, and process inspection."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit import census, mindir, models
from testkit.plain import PlainProcess
from testkit.service import Service
from testkit.waiting import until
from weightd import Client, Pending
from weightd_protocol.messages.status import ModelStatus, ProcessStatus

Arrays = Mapping[str, NDArray[Any]]

ENGINES = ("onnxruntime", "mindspore_lite")

# Mark of files that test the daemon, independent of the engine.
ONE_ENGINE = pytest.mark.engines("onnxruntime")
SUFFIX = {"onnxruntime": ".onnx", "mindspore_lite": ".mindir"}

# Limit of every wait; large enough for a busy machine.
LIMIT_S = 30.0

MLP_WIDTH = 768
MLP_WEIGHT_BYTES = 4 * MLP_WIDTH * MLP_WIDTH * 4
LARGE_WIDTH = 1024
LARGE_WEIGHT_BYTES = 8 * LARGE_WIDTH * LARGE_WIDTH * 4

_WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "mlp": lambda path: models.mlp(path, layers=4, width=MLP_WIDTH),
    "other_mlp": lambda path: models.mlp(path, layers=4, width=MLP_WIDTH, seed=1),
    "large": lambda path: models.mlp(path, layers=8, width=LARGE_WIDTH),
    "two_inputs": models.two_inputs,
    "two_batches": models.two_batches,
    "integers": models.integers,
    "embedding": models.embedding,
    "fixed": models.fixed,
    "lengths": models.lengths,
}


class Zoo:
    """Small model files by name and engine; each is written and converted once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str, engine: str) -> Path:
        """Return the file of the model for the engine."""
        onnx = self._directory / f"{name}.onnx"
        if not onnx.exists():
            _WRITERS[name](onnx)
        converted = onnx.with_suffix(SUFFIX[engine])
        if not converted.exists():
            python = mindir.interpreter()
            assert python, mindir.HOW_TO_GET_IT
            mindir.convert(onnx, converted, python)
        return converted


class BareEngine:
    """An engine called without weightd, for reference answers."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._plain: dict[Path, PlainProcess] = {}

    def process(self, model: Path) -> PlainProcess:
        """Return a process that has loaded the model, without weightd."""
        if model not in self._plain:
            engine = {suffix: engine for engine, suffix in SUFFIX.items()}[model.suffix]
            self._plain[model] = self._stack.enter_context(PlainProcess(model, engine))
        return self._plain[model]

    def answer(self, model: Path, inputs: Arrays) -> Arrays:
        """Return the answer of the engine without weightd."""
        return self.process(model).infer(inputs)

    def questions(self, model: Path, inputs: Iterable[Arrays]) -> list[SampleRequest]:
        """Return a request for each of the inputs, with the engine's answer."""
        return [SampleRequest(each, self.answer(model, each)) for each in inputs]


class SampleRequest(NamedTuple):
    """The inputs of a request and the expected outputs, bit for bit."""

    inputs: Arrays
    answer: Arrays


def mlp_inputs(batches: Iterable[int], width: int = MLP_WIDTH) -> list[Arrays]:
    """Return inputs of the mlp model, all different: one array per batch size."""
    random = np.random.default_rng(7)
    return [{"x": random.standard_normal((batch, width), dtype=np.float32)} for batch in batches]


def pairs(batches: Iterable[int]) -> list[Arrays]:
    """Return inputs of the models two_inputs and two_batches."""
    random = np.random.default_rng(8)

    def one(batch: int) -> NDArray[np.float32]:
        return random.standard_normal((batch, 4), dtype=np.float32)

    return [{"a": one(batch), "b": one(batch)} for batch in batches]


def embeddings(batches: Iterable[int], engine: str) -> list[Arrays]:
    """Return inputs of the integers model: int64 for ONNX Runtime, int32 for MindSpore Lite."""
    random = np.random.default_rng(9)
    dtype = np.int64 if engine == "onnxruntime" else np.int32
    return [{"ids": random.integers(0, 16, (batch, 3)).astype(dtype)} for batch in batches]


def assert_same(got: Arrays, expected: Arrays) -> None:
    """Assert that the outputs are the same bit for bit, names, dtypes and shapes included."""
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert got[name].tobytes() == array.tobytes(), f"{name}: the bits differ"


def ask_all(client: Client, model: str, questions: Sequence[SampleRequest]) -> None:
    """Submit all requests at once and check every answer."""
    pending = [client.submit(model, question.inputs) for question in questions]
    for each, question in zip(pending, questions, strict=True):
        assert_same(each.result(), question.answer)


L = TypeVar("L", bound="Load")

_FAST_S = 0.2
_PAUSE_S = 0.02


class Load:
    """Client threads that keep requests in flight and check every answer, until the block ends.

    The threads send requests at full speed for a moment after each `wait_for`, while the test acts, and then more
    slowly, to leave the CPU to the processes that the test waits for. The block fails unless every answer was right.
    """

    def __init__(
        self, address: str, model: str, questions: Sequence[SampleRequest], clients: int = 2, in_flight: int = 4
    ) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fast_until = time.monotonic() + _FAST_S
        arguments = (address, model, questions, in_flight)
        self._threads = [threading.Thread(target=self._run, args=arguments, daemon=True) for _ in range(clients)]

    def __enter__(self: L) -> L:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if kind is None:
            assert not self.wrong, self.wrong[:3]
            assert self.answered

    def wait_for(self, more: int) -> None:
        """Wait until this many more requests have been answered."""
        enough = self.answered + more
        until(lambda: self.answered >= enough or self.wrong, f"{more} more answers")
        self._fast_until = time.monotonic() + _FAST_S

    def _run(self, address: str, model: str, questions: Sequence[SampleRequest], in_flight: int) -> None:
        try:
            with Client(address, timeout=60) as client:
                pending: deque[tuple[Pending, SampleRequest]] = deque()
                count = 0
                while not self._stop.is_set() or pending:
                    while not self._stop.is_set() and len(pending) < in_flight:
                        question = questions[count % len(questions)]
                        pending.append((client.submit(model, question.inputs), question))
                        count += 1
                    if pending:
                        self._check(*pending.popleft())
                    if time.monotonic() > self._fast_until:
                        self._stop.wait(_PAUSE_S)
        except Exception as error:  # noqa: BLE001 - any error fails the block
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _check(self, pending: Pending, question: SampleRequest) -> None:
        assert_same(pending.result(), question.answer)
        with self._lock:
            self.answered += 1


class DaemonPaths:
    """Directories and an address for a daemon that the test starts."""

    def __init__(self, runtime: Path, cache: Path) -> None:
        self.runtime = runtime
        self.cache = cache
        self.address = f"{runtime}/weightd.sock"
        self.zmq_address = f"ipc://{self.address}"

    def config(
        self,
        tables: Mapping[str, Mapping[str, object]],
        listeners: Mapping[str, str] = MappingProxyType({}),
        **daemon: object,
    ) -> Path:
        """Write a configuration of these models and listeners; return its path."""
        directories = {"socket": self.zmq_address, "runtime_dir": self.runtime, "cache_dir": self.cache}
        lines = ["[daemon]", *_toml({**directories, **daemon})]
        for name, address in listeners.items():
            insecure = {"insecure": True} if address.startswith("tcp://") else {}
            lines += [f"[listeners.{name}]", *_toml({"address": address, **insecure})]
        for name, table in tables.items():
            lines += [f"[models.{name}]", *_toml(with_interpreter(table))]
        path = self.runtime / "weightd.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def serve(
        self,
        tables: Mapping[str, Mapping[str, object]],
        listeners: Mapping[str, str] = MappingProxyType({}),
        **daemon: object,
    ) -> Weightd:
        """Return a daemon that serves these models; see `config`."""
        return Weightd(self.runtime / "weightd.log", "serve", self.config(tables, listeners, **daemon))

    @property
    def left(self) -> list[str]:
        """Return the files that a daemon has left behind."""
        return left_behind(self.runtime, self.cache)


def with_interpreter(table: Mapping[str, object]) -> dict[str, object]:
    """Return the model's table with an interpreter that has its engine, unless the table names one."""
    engine = {suffix: engine for engine, suffix in SUFFIX.items()}[Path(str(table["path"])).suffix]
    return {"python": interpreter(engine), **table}


def _toml(table: Mapping[str, object]) -> list[str]:
    """Format a table as TOML; strings and numbers look the same in TOML and JSON."""
    return [f"{key} = {json.dumps(str(value) if isinstance(value, Path) else value)}" for key, value in table.items()]


class Weightd:
    """The command `weightd` with arguments; killed at the end of the block if it still runs.

    `under` is the start of the command line: a program that executes or starts `weightd`.
    """

    def __init__(self, log: Path, *arguments: object, session: bool = False, under: Sequence[str] = ()) -> None:
        self._log = log
        self._command = [*under, sys.executable, "-m", "weightd_daemon", *map(str, arguments)]
        self._session = session

    def __enter__(self) -> Weightd:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=self._session
            )
        self.pid: int = self._process.pid
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        """The output of the command so far."""
        return self._log.read_text("utf-8", "replace")

    def wait(self, limit: float = LIMIT_S) -> int:
        """Wait until the command exits; return its exit status."""
        return self._process.wait(limit)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the exit, and return the exit status."""
        os.kill(self.pid, number)
        return self.wait()

    def wait_for(self, text: str) -> None:
        """Wait until the command has logged the text."""
        until(lambda: text in self.log or self._process.poll() is not None, f"it logs {text!r}")
        assert text in self.log, self.log

    def client(self, address: str) -> Client:
        """Connect as soon as the daemon listens."""
        self.wait_for("listens on")
        return Client(address, timeout=60)


def weightd(*arguments: object, limit: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Run the command `weightd` until it exits."""
    command = [sys.executable, "-m", "weightd_daemon", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)


def model_status(service: Service, name: str) -> ModelStatus:
    """Return the status of a model."""
    return next(model for model in service.status().models if model.name == name)


def processes(service: Service, name: str, role: str) -> list[ProcessStatus]:
    """Return the holders or the workers of a model."""
    return [each for each in model_status(service, name).generations[-1].processes if each.role == role]


def ready_workers(service: Service, name: str) -> list[ProcessStatus]:
    """Return the workers of a model that are READY."""
    return [each for each in processes(service, name, "worker") if each.state == "ready"]


def kill_a_worker(service: Service, load: Load) -> None:
    """Kill a worker of the model "mlp"; check that its replacement serves requests and shares the weights."""
    before = {each.name: each for each in ready_workers(service, "mlp")}
    victim = next(iter(before.values()))
    os.kill(victim.pid, signal.SIGKILL)

    def successor_serves() -> bool:
        now = {each.name: each for each in ready_workers(service, "mlp")}
        return len(now) == len(before) and victim.name not in now and all(each.served for each in now.values())

    until(successor_serves, "the replacement serves")
    load.wait_for(20)
    status = model_status(service, "mlp")
    assert (status.state, status.failed) == ("serving", 0)
    assert f"{victim.name} lost: killed by SIGKILL" in service.log
    for each in status.generations[0].processes:
        assert (each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES, each


def cause_of_failure(service: Service, name: str) -> str:
    """Wait until the model has FAILED, and return the reason."""

    def cause() -> str:
        generation = model_status(service, name).generations[-1]
        return generation.reason if generation.state == "failed" else ""

    return until(cause, f"{name} fails")


def left_behind(runtime: Path, cache: Path) -> list[str]:
    """Return the files that a daemon has left in its directories, except configuration, log and counters."""
    paths = [path for path in [*runtime.rglob("*"), *cache.rglob("*")] if path.suffix != ".counters"]
    return sorted(str(path) for path in paths if path.name not in ("weightd.toml", "weightd.log"))


def children_of(cache: Path) -> set[int]:
    """Return the processes whose log path or command line contains this cache directory."""
    pids = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    return {pid for pid in pids if census.log(pid).startswith(f"{cache}/") or str(cache) in _command_line(pid)}


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


@contextlib.contextmanager
def core_dumps() -> Generator[None, None, None]:
    """Allow processes started in the block to dump core with all memory, up to their hard limits."""
    limits, filter_file = resource.getrlimit(resource.RLIMIT_CORE), Path("/proc/self/coredump_filter")
    before = filter_file.read_text("ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    filter_file.write_text("0x33", "ascii")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
        filter_file.write_text(f"0x{before.strip()}", "ascii")


def core_dump_of(pid: int) -> tuple[int, int]:
    """Return the size limit of a process's core file, and its coredump_filter."""
    limit, _ = resource.prlimit(pid, resource.RLIMIT_CORE)
    return limit, int(Path(f"/proc/{pid}/coredump_filter").read_text("ascii"), 16)


class Watched:
    """Processes watched by pidfd, so that a reused pid is not mistaken for one of them."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pidfds = {pid: os.pidfd_open(pid) for pid in pids}

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def survivors(self) -> list[int]:
        """Return the processes that still run."""
        return [pid for pid, pidfd in self._pidfds.items() if not select.select([pidfd], [], [], 0)[0]]


def interpreter(engine: str) -> Path:
    """Return the interpreter that has the engine."""
    if engine == "onnxruntime":
        return Path(sys.executable)
    python = mindir.interpreter()
    assert python, mindir.HOW_TO_GET_IT
    return python
