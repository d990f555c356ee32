"""Ranks of the real MindSpore without weightd: exported slices, and a group that tests call directly.

`export` writes the slices of the example of docs/ranks.md in three seconds. A `Group` is a scheduler and its ranks,
each a process of `ranks_child.py`. A group starts in ten seconds on two idle cores and takes 400 MB for each process,
more than half of it in shared files; tests should start few groups, one at a time.
"""

from __future__ import annotations

import contextlib
import functools
import io
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[3]
HOW_TO_GET_IT = "no working .venv-mindspore: `make .venv-mindspore` makes it"
EXAMPLE = REPOSITORY / "examples" / "ranks"

EXPORT_LIMIT_S = 120
ANSWER_LIMIT_S = 90  # includes a group's start on a busy machine
CONNECT_S = 60
LONG_S = 60  # time that a rank waits for another one in a predict
INPUTS, OUTPUTS = 16, 8  # of the example: x FP32 [N, 16] -> output_0 FP32 [N, 8]

Arrays = Dict[str, Any]
_LENGTH = struct.Struct(">I")


_PAIR = """
import sys
import mindspore as ms
from mindspore import Tensor, nn, ops

class Pair(nn.Cell):
    def __init__(self):
        super().__init__()
        self.sum, self.add = ops.AllReduce(group="mccl_world_group"), ops.Add()

    def construct(self, a, b):
        return self.sum(self.add(self.sum(a), b))

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
free = Tensor(shape=[None, 4], dtype=ms.float32)
ms.export(Pair(), free, free, file_name=sys.argv[1], file_format="MINDIR")
"""


class Slices(NamedTuple):
    """Files written by the example's script.

    Attributes:
        directory: directory of all files, among them `whole.ckpt`.
        paths: path of each rank's file, in the order of ranks; `pattern` is the pattern of all.
        selftest_path: an .npz with "x" and the right "output_0", computed by the network before the split.
    """

    directory: Path
    paths: Sequence[Path]
    selftest_path: Path

    @property
    def pattern(self) -> str:
        """The pattern of all paths, as in the table [models.NAME]."""
        return str(self.directory / "rank{rank}.mindir")


@functools.lru_cache(maxsize=None)
def interpreter() -> Optional[Path]:
    """Return the repository's `.venv-mindspore/bin/python`, or None if that environment is not complete."""
    python = REPOSITORY / ".venv-mindspore" / "bin" / "python"
    return python if (REPOSITORY / ".venv-mindspore" / ".made").exists() and python.exists() else None


def export(directory: Path, *, ranks: int = 2, hidden: int = 64) -> Slices:
    """Split the example's network with the example's script. The network has 96 bytes for each unit of `hidden`."""
    _run(str(EXAMPLE / "export.py"), str(directory), "--ranks", str(ranks), "--hidden", str(hidden))
    paths = [directory / f"rank{rank}.mindir" for rank in range(ranks)]
    return Slices(directory, paths, directory / "selftest.npz")


def export_pair(path: Path) -> Path:
    """Export one slice for every rank: a, b FP32 [N, 4], [M, 4] -> output_0, where N and M must fit each other.

    The network sums a over the ranks, adds b, and sums again. If N and M do not fit, it fails after the first sum.
    """
    # MindSpore reads the source of the network that it compiles, so the source must be in a file.
    script = path.with_suffix(".py")
    script.write_text(_PAIR, "utf-8")
    _run(str(script), str(path.with_suffix("")))
    return path


def inputs(rows: int, seed: int = 0) -> Arrays:
    """Return `rows` rows for the example's network, different for each seed."""
    return {"x": np.random.default_rng(seed).standard_normal((rows, INPUTS)).astype(np.float32)}


class RankError(Exception):
    """Error: a rank replied with an error. The text begins with the name of the error's class."""


class Group:
    """A scheduler and connected ranks, each with its slice loaded; all exit at the end of the block.

    Args:
        paths: path of each rank's file.
        plain: whether the ranks use MindSpore alone, without weightd, as the reference of comparisons.
        exec_timeout: seconds that a rank waits for another one.

    Attributes:
        scheduler, ranks: the processes.
        start_s: seconds from the first process to the first answer.
    """

    def __init__(self, paths: Sequence[Path], *, plain: bool = False, exec_timeout: int = LONG_S) -> None:
        self._paths = paths
        self._how = "plain" if plain else "engine"
        self._exec_timeout = exec_timeout
        self._stack = contextlib.ExitStack()
        self._sockets: List[socket.socket] = []

    def __enter__(self) -> Group:
        started_at = time.perf_counter()
        port = _free_port()
        with contextlib.ExitStack() as stack:
            self.scheduler = self._start(stack, "scheduler", 0, port, None)
            self.ranks: List[subprocess.Popen[bytes]] = []
            for rank in range(len(self._paths)):
                mine, its = socket.socketpair()
                mine.settimeout(ANSWER_LIMIT_S)
                self._sockets.append(stack.enter_context(mine))
                with its:
                    self.ranks.append(self._start(stack, "rank", rank, port, its))
            for rank, path in enumerate(self._paths):
                self.send(rank, "load", {"path": np.array(str(path))})
            for rank in range(len(self._paths)):
                self.receive(rank)
            self.ask("predict", inputs(1))
            self._stack = stack.pop_all()
        self.start_s = time.perf_counter() - started_at
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, order: str, arrays: Mapping[str, Any]) -> List[Arrays]:
        """Send an order to all ranks; return the answer of each.

        - "predict": predict with weightd's engine, or with MindSpore in a plain group.
        - "direct": predict with MindSpore, without weightd.
        - "measure": "times" direct predictions; the answer is "seconds", an array.
        - "parent": the answer is "signal", which the process receives when its parent exits.
        """
        for rank in range(len(self.ranks)):
            self.send(rank, order, arrays)
        answers: List[Arrays] = []
        errors: List[RankError] = []
        for rank in range(len(self.ranks)):
            try:
                answers.append(self.receive(rank))
            except RankError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def send(self, rank: int, order: str, arrays: Mapping[str, Any]) -> None:
        """Send an order to one rank. The rank waits for the other ranks in collective operations."""
        data = io.BytesIO()
        np.savez(data, _order=np.array(order), **arrays)
        self._sockets[rank].sendall(_LENGTH.pack(data.tell()) + data.getvalue())

    def receive(self, rank: int) -> Arrays:
        """Return a rank's next answer.

        Raises:
            RankError: the answer is an error.
            EOFError: the rank has exited.
        """
        file = self._sockets[rank]
        [length] = _LENGTH.unpack(_exactly(file, _LENGTH.size))
        with np.load(io.BytesIO(_exactly(file, length))) as answer:
            arrays = dict(answer)
        if "_error" in arrays:
            raise RankError(str(arrays["_error"]))
        return arrays

    def _start(
        self, stack: contextlib.ExitStack, role: str, rank: int, port: int, its: Optional[socket.socket]
    ) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("ranks_child.py")
        numbers = [rank, len(self._paths), port, CONNECT_S, self._exec_timeout, its.fileno() if its else -1]
        command = [str(_python()), str(script), role, self._how, *map(str, numbers)]
        # MindSpore writes descriptions of its errors to files in the working directory.
        home = stack.enter_context(tempfile.TemporaryDirectory())
        fds = [its.fileno()] if its else []
        process = subprocess.Popen(command, pass_fds=fds, cwd=home, stdout=subprocess.DEVNULL)
        stack.callback(_end, process)
        return process


def _run(*arguments: str) -> None:
    command = [str(_python()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the slices could not be exported:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # A stopped process must continue before it can exit.
    process.send_signal(signal.SIGCONT)
    process.wait(ANSWER_LIMIT_S)


def _exactly(file: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = file.recv(count - len(data))
        if not part:
            raise EOFError("the rank has exited")
        data += part
    return data


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _python() -> Path:
    python = interpreter()
    if python is None:
        raise RuntimeError(HOW_TO_GET_IT)
    return python
