"""Fixtures: weightctl in this process, a fake daemon, and its replies."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, Handler, address, client, daemon, directory
from weightctl.cli import main
from weightd_protocol.codec import encode
from weightd_protocol.messages.inference import Error, InferResponse, ResponseDescription, TensorSpec
from weightd_protocol.messages.status import ExecutionsStatus, ModelStatus, StatusResponse
from weightd_protocol.messages.types import ClientMessage

__all__ = ["address", "client", "daemon", "directory"]

X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Ran(NamedTuple):
    """The output and exit status of a command."""

    status: int
    out: str
    err: str


class Ctl:
    """Runs weightctl in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], address: str) -> None:
        self._capsys = capsys
        self._address = address

    def __call__(self, *arguments: str) -> Ran:
        try:
            status: Any = main(["--socket", self._address, *arguments])
        except SystemExit as ended:
            status = ended.code
        captured = self._capsys.readouterr()
        return Ran(status, captured.out, captured.err)


@pytest.fixture
def alone(capsys: pytest.CaptureFixture[str], address: str) -> Ctl:
    """Return weightctl without a daemon."""
    return Ctl(capsys, address)


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], daemon: FakeDaemon) -> Ctl:
    """Return weightctl connected to `daemon`."""
    return Ctl(capsys, daemon.address)


@pytest.fixture
def x(tmp_path: Path) -> str:
    """Return the path of a file with an array."""
    path = tmp_path / "x.npy"
    np.save(str(path), X)
    return str(path)


def reports(status: StatusResponse) -> Handler:
    return lambda message, _: [encode(replace(status, id=message.id))]


def fails(code: str, text: str, retry_after: Optional[int] = None) -> Handler:
    return lambda message, _: [encode(Error(message.id, code, text, retry_after))]


def outputs(*named: Any) -> Handler:
    """Return a handler that replies with these (name, array)."""

    def handle(message: ClientMessage, tensors: Sequence[bytes]) -> List[List[Any]]:
        datatypes = {"f": "FP32", "i": "INT64", "b": "BOOL"}
        specs = tuple(TensorSpec(name, datatypes[array.dtype.kind], array.shape) for name, array in named)
        return [
            [
                *encode(InferResponse(message.id, ResponseDescription("m", specs))),
                *(array.tobytes() for _, array in named),
            ]
        ]

    return handle


def counted(message: ClientMessage, served: int, executions: int, cut: int = 0) -> List[List[Any]]:
    """Reply to a status request with these counters of the model m."""
    ran = ExecutionsStatus(executions, split=cut)
    model = ModelStatus("m", "fake", "/m", "serving", 0, served, 0, (), executions=ran)
    return [encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, (model,)))]


@pytest.fixture
def default_sigint_handler() -> Iterator[None]:
    """Restore SIGINT's default handler: shells ignore it in background jobs, and Python inherits that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
