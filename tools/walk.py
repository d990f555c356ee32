"""Number of file changes that a reader of a code path makes: `python -m tools.walk`.

The script starts a daemon with ONNX Runtime workers, each under `sys.setprofile`, and follows four paths:

- request: one inference request in the daemon, both directions, from the moment the client's socket is readable until
  the reply is sent;
- worker: the same request in the worker;
- handle: the handle of the shared weights in the daemon, from the holder's Built until the worker's Attach is sent;
- status: `weightctl status` in the daemon.

A change of file is a pair of consecutive call or return events in different files of the product; a change of package
is one whose files are in different folders. Only the main thread of a process is followed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("client", "cluster", "common", "ctl", "daemon", "gateway", "protocol", "worker")

_WARM_UP = 20
_START_LIMIT_S = 60.0
# Pause between two requests, so that no iteration of the event loop handles both.
_PAUSE_S = 0.02

# C functions that wait for the next event, and C functions that send.
_WAITS = frozenset({"poll", "select"})
_SENDS = frozenset({"send", "sendmsg"})


class Recorder:
    """Writes one line of JSON for each iteration of a process's event loop: the files run between two waits.

    Args:
        prefix: path of the output files, to which the recorder appends the pid of the process.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[str, str | None] = {}
        self._file: Any = None
        self._pid = 0
        self._last = ""
        self._begin_turn()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record an event; `sys.setprofile` calls this."""
        if event in ("call", "return"):
            name = self._product_file(frame.f_code.co_filename)
            if name is not None:
                if name != self._last:
                    self._path.append(name)
                    self._last = name
                self._mark_messages(frame, event, argument)
        elif event == "c_call" and argument.__name__ in _WAITS:
            self._end_turn()
        elif event == "c_return" and argument.__name__ in _WAITS:
            self._begin_turn()
        elif event == "c_return" and argument.__name__ in _SENDS:
            self._sent = len(self._path)

    def _product_file(self, file: str) -> str | None:
        name = self._names.get(file)
        if name is None and file not in self._names:
            with contextlib.suppress(ValueError):
                relative = Path(file).relative_to(ROOT)
                name = str(relative) if relative.parts[0] in PRODUCT else None
            self._names[file] = name
        return name

    def _mark_messages(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record at which place in the iteration the daemon decodes Built and encodes Attach."""
        if event == "return" and frame.f_code.co_name == "decode" and type(argument).__name__ == "Built":
            self._built = len(self._path) - 1
        elif event == "call" and frame.f_code.co_name == "encode":
            message = frame.f_locals.get("message")
            if type(message).__name__ == "Attach":
                self._attach = len(self._path)

    def _begin_turn(self) -> None:
        self._path: list[str] = []
        self._last = ""
        self._sent = 0
        self._built = self._attach = -1
        self._at = time.monotonic()

    def _end_turn(self) -> None:
        if not self._path:
            return
        if self._pid != os.getpid():
            # A forked process writes to a separate file.
            self._pid = os.getpid()
            self._file = open(f"{self._prefix}.{self._pid}", "a", buffering=1)  # noqa: SIM115, PTH123 - open to the end
        turn = Turn(self._at, self._path, self._sent, self._built, self._attach)
        self._file.write(json.dumps(turn.__dict__) + "\n")
        self._begin_turn()


@dataclass(frozen=True)
class Turn:
    """One iteration of a process's event loop, between two waits.

    Attributes:
        at: begin of the iteration, monotonic seconds.
        path: the files that ran; consecutive events in the same file, a stay, are one entry.
        sent: number of stays when the last message was sent; 0 without messages.
        built: index of the stay in which a Built was decoded; -1 if there was no Built.
        attach: index of the stay in which an Attach was encoded; -1 if there was no Attach.
    """

    at: float
    path: list[str]
    sent: int
    built: int
    attach: int


@dataclass(frozen=True)
class Walk:
    """The files of one code path, in the order in which they ran."""

    stays: Sequence[str]

    @property
    def files(self) -> int:
        """Return the number of different files."""
        return len({*self.stays})

    @property
    def file_changes(self) -> int:
        """Return the number of changes of the file."""
        return sum(one != other for one, other in itertools.pairwise(self.stays))

    @property
    def package_changes(self) -> int:
        """Return the number of changes of the folder."""
        return sum(Path(one).parent != Path(other).parent for one, other in itertools.pairwise(self.stays))


def run_traced(prefix: str, arguments: Sequence[str]) -> None:
    """Run `-m MODULE ARGUMENTS`, as the interpreter would, with a recorder."""
    if "-m" not in arguments:
        # The daemon queries the version of Python or the location of the engine, which runs no code of the product.
        os.execv(sys.executable, [sys.executable, *arguments])  # noqa: S606 - no shell is wanted
    module, *rest = arguments[arguments.index("-m") + 1 :]
    sys.argv = [module, *rest]
    sys.setprofile(Recorder(prefix))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def read_turns(directory: Path, role: str) -> list[list[Turn]]:
    """Return the iterations of each process of this role."""
    return [
        [Turn(**json.loads(line)) for line in path.read_text().splitlines()]
        for path in sorted(directory.glob(f"{role}.*"))
    ]


def walk_of(turns: Sequence[Turn], begin: float, end: float) -> Walk | None:
    """Return the path of the iterations that began in this time, up to the last message that was sent."""
    chosen = [turn for turn in turns if begin <= turn.at < end]
    while chosen and not chosen[-1].sent:
        chosen.pop()
    if not chosen:
        return None
    last = chosen.pop()
    return Walk([*itertools.chain.from_iterable(turn.path for turn in chosen), *last.path[: last.sent]])


def handle_walk(turns: Sequence[Turn]) -> Walk:
    """Return the path of the handle of the shared weights: from a Built to the next Attach."""
    stays: list[str] = []
    is_inside = False
    for turn in turns:
        if turn.built >= 0 and not is_inside:
            is_inside = True
            path = turn.path[turn.built :]
        else:
            path = turn.path
        if not is_inside:
            continue
        if turn.attach >= 0:
            return Walk([*stays, *turn.path[: turn.attach]])
        stays += path
    raise RuntimeError("expected a Built and then an Attach, got none")


@contextlib.contextmanager
def traced_daemon(directory: Path, workers: int) -> Generator[Callable[[], Any], None, None]:
    """Run a daemon and its workers with recorders; yield a function that connects a client."""
    from benchmarks import material  # noqa: PLC0415 - the traced processes do not need this module

    from weightd import Client  # noqa: PLC0415 - the traced processes do not need this module

    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} --trace {directory}/worker -- "$@"\n')
    python.chmod(0o755)
    model = material.model(material.TINY, "onnxruntime")
    socket = directory / "s"
    (directory / "weightd.toml").write_text(
        f'[daemon]\nsocket = "ipc://{socket}"\nruntime_dir = "{directory}"\ncache_dir = "{directory}/cache"\n'
        f'[models.{material.TINY}]\npath = "{model}"\npython = "{python}"\nworkers = {workers}\n'
    )
    command = [sys.executable, __file__, "--trace", f"{directory}/daemon", "--", "-m", "weightd_daemon", "serve"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([*command, str(directory / "weightd.toml")], stderr=log)
    try:
        yield lambda: Client(str(socket), timeout=_START_LIMIT_S)
    finally:
        process.terminate()
        process.wait()


def measure(count: int) -> dict[str, list[Walk]]:
    """Return all measured instances of each of the four paths."""
    from benchmarks import material  # noqa: PLC0415 - the traced processes do not need this module

    times: dict[str, list[tuple[float, float]]] = {"request": [], "status": []}
    with tempfile.TemporaryDirectory(prefix="walk-", dir="/tmp") as name:
        directory = Path(name)
        with traced_daemon(directory, workers=1) as connect, _connected(connect) as client:
            inputs = material.inputs(material.TINY_WIDTH)[0]
            for _ in range(_WARM_UP):
                client.infer(material.TINY, inputs)
            calls: dict[str, Callable[[], object]] = {
                "request": lambda: client.infer(material.TINY, inputs),
                "status": client.status,
            }
            for kind, call in calls.items():
                for _ in range(count):
                    time.sleep(_PAUSE_S)
                    begin = time.monotonic()
                    call()
                    times[kind].append((begin, time.monotonic()))
            time.sleep(_PAUSE_S)
        [daemon] = [turns for turns in read_turns(directory, "daemon") if any(turn.built >= 0 for turn in turns)]
        # All processes of the model are traced; the worker is the one that sent messages during the requests.
        begin, end = times["request"][0][0], times["request"][-1][1]
        workers = [
            turns
            for turns in read_turns(directory, "worker")
            if any(begin <= each.at < end for each in turns if each.sent)
        ]
    walks = {kind: [walk_of(daemon, *each) for each in spans] for kind, spans in times.items()}
    walks["worker"] = [walk_of(turns, *each) for turns in workers for each in times["request"]]
    found = {kind: [each for each in those if each is not None] for kind, those in walks.items()}
    return {**found, "handle": [handle_walk(daemon)]}


@contextlib.contextmanager
def _connected(connect: Callable[[], Any]) -> Generator[Any, None, None]:
    """Yield a client, as soon as the daemon that was just started accepts it."""
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            client = connect()
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    with client:
        yield client


def main() -> int:
    """Measure and print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.walk", description="Counts how often the file changes along a code path."
    )
    parser.add_argument(
        "--count", type=int, default=25, help="number of requests and of status calls (default: %(default)s)"
    )
    parser.add_argument("--show", choices=["request", "worker", "handle", "status"], help="print the files of a path")
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        run_traced(options.trace, options.arguments)
        return 0
    walks = measure(options.count)
    print(f"{'path':10}{'files':>7}{'changes of file':>18}{'of package':>13}{'range':>12}{'n':>6}")
    for kind in ("request", "worker", "handle", "status"):
        those = walks[kind]
        changes = [walk.file_changes for walk in those]
        typical = min(those, key=lambda walk: abs(walk.file_changes - statistics.median(changes)))
        span = f"{min(changes)}-{max(changes)}"
        print(
            f"{kind:10}{typical.files:7}{typical.file_changes:18}{typical.package_changes:13}{span:>12}{len(those):6}"
        )
        if options.show == kind:
            print("\n".join(f"    {each}" for each in typical.stays))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]
    sys.exit(main())
