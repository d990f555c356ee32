"""The model that `advise` and `bench` measure: waits until the model is ready, shows progress and explains errors.

`read_counters` reads the daemon's counters of the model, which are compared before and after a measurement.
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

# Minimum seconds between two updates of the progress line, so that the measurement does not wait for the terminal.
_MIN_INTERVAL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser, help_suffix: str = "") -> None:
    """Declare the arguments MODEL and `--shape`. `help_suffix` is appended to the help text of `--shape`."""
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    request_inputs.add_shape_argument(parser, help_suffix)


@contextlib.contextmanager
def open_target(connect: Connect, model: str) -> Generator[BenchTarget, None, None]:
    """Context manager that connects to the daemon, waits until the model is ready, and provides the model.

    Raises:
        RequestError: the model does not exist, or is not ready within the timeout.
    """
    with connect() as client, ProgressLine() as progress:
        progress.show(f"{model}: waiting until the model is ready")
        with _explain_errors(model):
            metadata = client.metadata(model)
        yield BenchTarget(model, client, metadata.inputs, request_inputs.make_example(metadata), progress)


class BenchTarget(NamedTuple):
    """A model that is ready for measurements.

    Attributes:
        name: the model's name.
        client: the client that sends the requests.
        inputs: the inputs in the model's signature.
        example: shapes of the inputs with which the model has run, by name; empty if no such shapes are known.
        progress: the line that shows the progress of the measurement.
    """

    name: str
    client: Client
    inputs: Tuple[TensorSignature, ...]
    example: Mapping[str, request_inputs.Shape]
    progress: ProgressLine

    def show_progress(self, text: str) -> None:
        """Show the progress of the measurement, after the name of the model."""
        self.progress.show(f"{self.name}: {text}")

    def explain_errors(self) -> ContextManager[None]:
        """Within the block, add a hint about the probable cause to each error."""
        return _explain_errors(self.name, self.inputs)


class ProgressLine:
    """A line on stderr whose text is replaced by each update and erased at the end.

    If stderr is not a terminal, nothing is shown.
    """

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
        """Show `text` instead of the current text. If the last update was less than 0.1 s ago, do nothing."""
        if self._is_terminal and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _MIN_INTERVAL_S
            self._stream.write(f"{_ERASE}{text}")
            self._stream.flush()


class CounterSample(NamedTuple):
    """Counters of a model since the start of the daemon.

    Attributes:
        requests: the number of requests that were served.
        executions: the number of executions by workers. It is lower than the number of requests if some were batched,
            and higher if some were split.
        split_requests: the number of requests that the daemon split.
    """

    requests: int
    executions: int
    split_requests: int


def read_counters(status: StatusResponse, name: str) -> Optional[CounterSample]:
    """Return the counters of a model from a status.

    Return None if the status has no such model, or no counters for it.
    """
    for model in status.models:
        if model.name == name and model.executions is not None:
            return CounterSample(model.served, model.executions.count, model.executions.split)
    return None


def per_execution(before: Optional[CounterSample], after: Optional[CounterSample]) -> Optional[float]:
    """Return the mean number of requests in an execution between two samples; None if it is unknown."""
    if before is None or after is None or after.executions <= before.executions:
        return None
    return (after.requests - before.requests) / (after.executions - before.executions)


def has_split(before: Optional[CounterSample], after: Optional[CounterSample]) -> bool:
    """Return whether the daemon split a request between two samples; False if this is unknown."""
    return before is not None and after is not None and after.split_requests > before.split_requests


@contextlib.contextmanager
def _explain_errors(model: str, inputs: Sequence[TensorSignature] = ()) -> Generator[None, None, None]:
    hints: Dict[Type[RequestError], str] = dict.fromkeys(
        (DeadlineExceeded, FailedPrecondition, Unavailable),
        f"check `weightctl status {model}`, or set a longer --timeout",
    )
    if any(each.shape is None or -1 in each.shape for each in inputs):
        hint = f"set the free dimensions with --shape: {request_inputs.describe(inputs)}"
        hints.update(dict.fromkeys((Internal, InvalidArgument), hint))
    try:
        yield
    except RequestError as error:
        if type(error) not in hints:
            raise
        raise type(error)(f"{str(error).rstrip()}; {hints[type(error)]}") from None
