"""The interface of a weightctl command, and the errors that commands raise."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Callable, Generator, NamedTuple

from weightctl import exit_codes
from weightd.client import Client
from weightd_protocol.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    RequestError,
    Unavailable,
    WeightdError,
)
from weightd_protocol.messages.status import StatusResponse
from weightd_protocol.model_names import split_version

# A function that connects to the daemon, with the connection options of the command line.
Connect = Callable[[], Client]


class Command(NamedTuple):
    """A command of weightctl.

    Attributes:
        help: a summary of the command in one line.
        description: the description that `--help` prints.
        add_arguments: a function that declares the arguments of the command.
        run: a function that executes the command, prints its output to stdout, and returns the exit status.
        manual: additional text for the manual page of the command.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Connect], int]
    manual: str = ""


class CommandError(WeightdError):
    """A command failed. Subclasses set the exit status and the error code for each cause.

    Attributes:
        status: the exit status of weightctl after this error.
        code: the error code that is printed before the error text.
    """

    status = exit_codes.ERROR
    code = InvalidArgument.code


class BadInput(CommandError):
    """An input file cannot be used. The error text names the file and the reason."""

    status = exit_codes.NO_INPUT


class BadOutput(CommandError):
    """An output cannot be written. The error text names the file and the reason."""

    status = exit_codes.CANNOT_WRITE
    code = Internal.code


class NotComplete(CommandError):
    """An operation did not complete within the timeout. The daemon continues the operation."""

    status = exit_codes.NOT_YET
    code = DeadlineExceeded.code


class DaemonUnreachable(CommandError):
    """The daemon cannot be reached. The error text gives the reason."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(str(reason))
        self.code = reason.code
        self.status = _STATUS_BY_CODE.get(reason.code, exit_codes.UNAVAILABLE)


@contextlib.contextmanager
def must_answer() -> Generator[None, None, None]:
    """Within the block, convert errors of a daemon that does not respond to `DaemonUnreachable`.

    `DaemonUnreachable` has a separate exit status.
    """
    try:
        yield
    except (Unavailable, DeadlineExceeded) as error:
        raise DaemonUnreachable(error) from None


@contextlib.contextmanager
def explain_denied(client: Client) -> Generator[None, None, None]:
    """Within the block, add a hint to `PermissionDenied` if the client uses ZeroMQ.

    The daemon allows operator commands only over its Unix socket.
    """
    try:
        yield
    except PermissionDenied as error:
        if client.transport == "unix":
            raise
        hint = "this connection uses ZeroMQ; use --socket unix:///PATH for the Unix socket"
        raise PermissionDenied(f"{error}; {hint}") from None


@contextlib.contextmanager
def operation_on(client: Client, model: str, operation: str) -> Generator[None, None, None]:
    """Within the block, explain the errors of an operation on a model.

    The error for a denied operation gets a hint. After a timeout, this function sends the daemon another request, in
    order to tell an operation that takes long from a daemon that does not respond.

    Raises:
        NotComplete: the daemon responds; the operation has not completed and continues.
        DaemonUnreachable: the daemon does not respond.
    """
    try:
        with explain_denied(client):
            yield
    except DeadlineExceeded as late:
        try:
            client.server()
        except RequestError:
            raise DaemonUnreachable(late) from None
        duration = f"{client.timeout:g} s"
        raise NotComplete(
            f"{model}: {operation} not complete after {duration} and continues; see `weightctl status {model}`"
        ) from None


_STATUS_BY_CODE = {InvalidArgument.code: exit_codes.USAGE, PermissionDenied.code: exit_codes.NO_PERMISSION}


def filter_model(status: StatusResponse, name: str) -> StatusResponse:
    """Return the status with only one model, or with the versions of one model.

    Raises:
        NotFound: no model has this name; the error has the names of the existing models.
    """
    models = tuple(model for model in status.models if name in (model.name, split_version(model.name)[0]))
    if not models:
        names = [model.name for model in status.models]
        raise NotFound(f"no model {name!r}; there are: {', '.join(names) or 'none'}")
    version_sets = tuple(each for each in status.version_sets if each.name == name)
    return dataclasses.replace(status, models=models, version_sets=version_sets)
