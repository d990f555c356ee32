"""The interface of a weightctl command, and the errors that commands raise."""

from __future__ import annotations

import argparse
import contextlib
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

# Connects to the daemon with the options of the command line.
Connect = Callable[[], Client]


class Command(NamedTuple):
    """A command of weightctl.

    Attributes:
        help: a summary in one line.
        description: the description that --help prints.
        add_arguments: declares the arguments of the command.
        run: executes the command, prints to stdout, and returns the exit status.
        manual: further text that only the manual page contains.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Connect], int]
    manual: str = ""


class CommandError(WeightdError):
    """A command failed.

    Attributes:
        status: the exit status of weightctl.
        code: the error code to print.
    """

    status = exit_codes.ERROR
    code = InvalidArgument.code


class BadInput(CommandError):
    """An input file cannot be used; the text names the file and the reason."""

    status = exit_codes.NO_INPUT


class BadOutput(CommandError):
    """The output cannot be written; the text names the file and the reason."""

    status = exit_codes.CANNOT_WRITE
    code = Internal.code


class NotComplete(CommandError):
    """The operation did not complete within the timeout, but the daemon continues with it."""

    status = exit_codes.NOT_YET
    code = DeadlineExceeded.code


class DaemonUnreachable(CommandError):
    """The daemon cannot be reached; the text gives the reason."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(str(reason))
        self.code = reason.code
        self.status = _STATUS_BY_CODE.get(reason.code, exit_codes.UNAVAILABLE)


@contextlib.contextmanager
def must_answer() -> Generator[None, None, None]:
    """Convert errors of an unresponsive daemon to `DaemonUnreachable`, which has a separate exit status."""
    try:
        yield
    except (Unavailable, DeadlineExceeded) as error:
        raise DaemonUnreachable(error) from None


@contextlib.contextmanager
def explain_denied(client: Client) -> Generator[None, None, None]:
    """Add a hint to `PermissionDenied` if the connection is over ZeroMQ, where operator commands are not allowed."""
    try:
        yield
    except PermissionDenied as error:
        if client.transport == "unix":
            raise
        hint = "this connection uses ZeroMQ; use --socket unix:///PATH for the Unix socket"
        raise PermissionDenied(f"{error}; {hint}") from None


@contextlib.contextmanager
def operation_on(client: Client, model: str, operation: str) -> Generator[None, None, None]:
    """Explain a denied operation; after a timeout, tell a long operation from a daemon that does not respond.

    Raises:
        NotComplete: the operation continues.
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


def check_model(status: StatusResponse, name: str) -> None:
    """Raise `NotFound`, with the names of the existing models, if no model has this name."""
    names = [model.name for model in status.models]
    if name not in names:
        raise NotFound(f"no model {name!r}; there are: {', '.join(names) or 'none'}")
