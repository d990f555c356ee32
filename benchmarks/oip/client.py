"""tritonclient in a separate environment and process, which times rounds of requests to a given server."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.material import Arrays, DifferenceError, UnavailableError
from testkit.mindir import REPOSITORY

PYTHON = REPOSITORY / ".venv-rival-client" / "bin" / "python"

_CHILD = Path(__file__).with_name("client_child.py")


@dataclasses.dataclass(frozen=True)
class Round:
    """A number of requests, one after another.

    Attributes:
        kind: "grpc", or "http" with binary tensors.
        address: address of the server, HOST:PORT.
        model: name of the model on the server.
        arrays: name of the model in the pairs of the client.
        count: number of requests.
    """

    kind: str
    address: str
    model: str
    arrays: str
    count: int


class TritonClient:
    """A process with tritonclient; `pairs` are the inputs of each model with the correct answers."""

    def __init__(self, pairs: Mapping[str, Sequence[tuple[Arrays, Arrays]]]) -> None:
        self._pairs = pairs

    def __enter__(self) -> TritonClient:
        if not PYTHON.exists():
            raise UnavailableError(f"tritonclient is not installed in {PYTHON.parent.parent}; run `make bench-gateway`")
        self._file = tempfile.NamedTemporaryFile(suffix=".npz")
        arrays: dict[str, Any] = {
            f"{model}.{index}.{name}": value
            for model, pairs in self._pairs.items()
            for index, (inputs, answer) in enumerate(pairs)
            for name, value in (*inputs.items(), *answer.items())
        }
        np.savez(self._file, **arrays)
        self._file.flush()
        pipe = subprocess.PIPE
        command = [str(PYTHON), "-I", str(_CHILD), self._file.name]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._file.close()

    def seconds(self, order: Round) -> list[float]:
        """Return the seconds of each request of a round.

        Raises:
            DifferenceError: an answer differs from the bare engine's.
        """
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(dataclasses.asdict(order)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise UnavailableError(f"tritonclient exited during {order}; its error is printed above")
        reply = json.loads(line)
        if "wrong" in reply:
            raise DifferenceError(f"{order}: answer {reply['wrong']} differs from the bare engine's")
        seconds: list[float] = reply["seconds"]
        return seconds
