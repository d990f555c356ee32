"""What a model takes, and errors that say what to do: for verbs that make up requests."""

from __future__ import annotations

import contextlib
from typing import Dict, Generator, Sequence, Type

from weightd.client.client import Client
from weightd.ctl.shapes import told
from weightd.protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    RequestError,
    Unavailable,
)
from weightd.protocol.messages.control import ModelMetadataResponse
from weightd.protocol.messages.data import TensorSignature


def described(client: Client, model: str) -> ModelMetadataResponse:
    """Return the metadata of a model, once it is ready.

    Raises:
        RequestError: it is not, or there is none of this name.
    """
    with asking(model):
        return client.metadata(model)


@contextlib.contextmanager
def asking(model: str, inputs: Sequence[TensorSignature] = ()) -> Generator[None, None, None]:
    """Say of an error what may be its reason.

    Args:
        model: which is asked in the block.
        inputs: what it takes, where that matters.
    """
    hints: Dict[Type[RequestError], str] = dict.fromkeys(
        (DeadlineExceeded, FailedPrecondition, Unavailable),
        f"weightctl status {model} tells how it stands, --timeout waits longer",
    )
    if any(each.shape is None or -1 in each.shape for each in inputs):
        hint = f"--shape says what the free dimensions are: {told(inputs)}"
        hints.update(dict.fromkeys((Internal, InvalidArgument), hint))
    try:
        yield
    except RequestError as error:
        if type(error) not in hints:
            raise
        raise type(error)(f"{str(error).rstrip()}; {hints[type(error)]}") from None
