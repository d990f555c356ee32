"""The model that `advise` and `bench` measure: they wait until it is ready, show progress, and explain its errors.

`read_counters` says what the daemon has counted of it meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import ContextManager, Dict, Generator, Mapping, NamedTuple, Optional, Sequence, TextIO, Tuple, Type

from weightctl import request_inputs
from weightctl.command import Connect
from weightd.client import Client
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    RequestError,
    Unavailable,
)
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import StatusResponse

_ERASE = "\r\x1b[K"

# Nobody reads faster, and what is measured is not to wait for a terminal.
_MIN_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser, help_suffix: str = "") -> None:
    """Declare which model it is, and `--shape`; `help_suffix` is to be said of that."""
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl status")
    request_inputs.add_shape_argument(parser, help_suffix)


@contextlib.contextmanager
def open_target(connect: Connect, model: str) -> Generator[BenchTarget, None, None]:
    """Have a model of this name that is ready, in the block.

    Raises:
        RequestError: it is not, or there is none.
    """
    with connect() as client, ProgressLine() as progress:
        progress.show(f"{model}: waits until it is ready")
        with _explain_errors(model):
            metadata = client.metadata(model)
        yield BenchTarget(model, client, metadata.inputs, request_inputs.make_example(metadata), progress)


class BenchTarget(NamedTuple):
    """A model that is ready.

    Attributes:
        name: its name.
        client: asks it.
        inputs: what it takes.
        example: shapes of its inputs that it is known to run on; empty where none are known.
        progress: shows how far that is.
    """

    name: str
    client: Client
    inputs: Tuple[TensorSignature, ...]
    example: Mapping[str, request_inputs.Shape]
    progress: ProgressLine

    def show_progress(self, text: str) -> None:
        """Show how far it is."""
        self.progress.show(f"{self.name}: {text}")

    def explain_errors(self) -> ContextManager[None]:
        """Say of an error in the block what may be its reason."""
        return _explain_errors(self.name, self.inputs)


class ProgressLine:
    """One line on stderr, written again and again; nothing, where that is no terminal. Gone after the block."""

    def __enter__(self) -> ProgressLine:
        self._stream: TextIO = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_at = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._stream.write(_ERASE)
            self._stream.flush()

    def show(self, text: str) -> None:
        """Show this in the place of what was shown, unless that is new, too."""
        if self._is_terminal and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _MIN_INTERVAL_S
            self._stream.write(f"{_ERASE}{text}")
            self._stream.flush()


class CounterSample(NamedTuple):
    """What the daemon has counted of a model since its start.

    Attributes:
        requests: how many were answered.
        executions: in how many executions: fewer, where some were run together; more, where some were cut.
        split_requests: how many requests were.
    """

    requests: int
    executions: int
    split_requests: int


def read_counters(status: StatusResponse, name: str) -> Optional[CounterSample]:
    """Return what is told of a model; None where there is none, or nothing is told."""
    for model in status.models:
        if model.name == name and model.executions is not None:
            return CounterSample(model.served, model.executions.count, model.executions.split)
    return None


def per_execution(before: Optional[CounterSample], after: Optional[CounterSample]) -> Optional[float]:
    """Return how many requests were in an execution on average; None where nothing is known of that."""
    if before is None or after is None or after.executions <= before.executions:
        return None
    return (after.requests - before.requests) / (after.executions - before.executions)


def has_split(before: Optional[CounterSample], after: Optional[CounterSample]) -> bool:
    """Whether a request was run in parts; not where nothing is known of that."""
    return before is not None and after is not None and after.split_requests > before.split_requests


@contextlib.contextmanager
def _explain_errors(model: str, inputs: Sequence[TensorSignature] = ()) -> Generator[None, None, None]:
    hints: Dict[Type[RequestError], str] = dict.fromkeys(
        (DeadlineExceeded, FailedPrecondition, Unavailable),
        f"weightctl status {model} tells how it stands, --timeout waits longer",
    )
    if any(each.shape is None or -1 in each.shape for each in inputs):
        hint = f"--shape says what the free dimensions are: {request_inputs.describe(inputs)}"
        hints.update(dict.fromkeys((Internal, InvalidArgument), hint))
    try:
        yield
    except RequestError as error:
        if type(error) not in hints:
            raise
        raise type(error)(f"{str(error).rstrip()}; {hints[type(error)]}") from None
