"""The model that is measured: it is waited for, and errors say what to do."""

from __future__ import annotations

import argparse
import contextlib
from typing import ContextManager, Dict, Generator, Mapping, NamedTuple, Sequence, Tuple, Type

from weightctl.command import Connect
from weightctl.measuring import shapes
from weightctl.measuring.progress import ProgressLine
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


def add_arguments(parser: argparse.ArgumentParser, help_suffix: str = "") -> None:
    """Declare which model it is, and `--shape`; `help_suffix` is to be said of that."""
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl status")
    shapes.add_argument(parser, help_suffix)


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
    example: Mapping[str, shapes.Shape]
    progress: ProgressLine

    def show_progress(self, text: str) -> None:
        """Show how far it is."""
        self.progress.show(f"{self.name}: {text}")

    def explain_errors(self) -> ContextManager[None]:
        """Say of an error in the block what may be its reason."""
        return _explain_errors(self.name, self.inputs)


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
        yield BenchTarget(model, client, metadata.inputs, shapes.make_example(metadata), progress)


@contextlib.contextmanager
def _explain_errors(model: str, inputs: Sequence[TensorSignature] = ()) -> Generator[None, None, None]:
    hints: Dict[Type[RequestError], str] = dict.fromkeys(
        (DeadlineExceeded, FailedPrecondition, Unavailable),
        f"weightctl status {model} tells how it stands, --timeout waits longer",
    )
    if any(each.shape is None or -1 in each.shape for each in inputs):
        hint = f"--shape says what the free dimensions are: {shapes.describe(inputs)}"
        hints.update(dict.fromkeys((Internal, InvalidArgument), hint))
    try:
        yield
    except RequestError as error:
        if type(error) not in hints:
            raise
        raise type(error)(f"{str(error).rstrip()}; {hints[type(error)]}") from None
