"""What a command of weightctl consists of, and the errors that it may end in."""

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

# Connects, with the address and the timeout of the command line.
Connect = Callable[[], Client]


class Command(NamedTuple):
    """One command of weightctl.

    Attributes:
        help: what it does, in a line.
        description: the same, with all that its user should know.
        add_arguments: declares its arguments.
        run: does it, prints to stdout, and returns the exit status.
    """

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Connect], int]


class CommandError(WeightdError):
    """A command could not do its work.

    Attributes:
        status: what weightctl exits with.
        code: what the error is called.
    """

    status = exit_codes.ERROR
    code = InvalidArgument.code


class BadInput(CommandError):
    """An input file cannot be used; the text names the file and says why."""

    status = exit_codes.NO_INPUT


class BadOutput(CommandError):
    """The output cannot be written; the text says where to, and why."""

    status = exit_codes.CANNOT_WRITE
    code = Internal.code


class DaemonUnreachable(CommandError):
    """The daemon cannot be reached, for the reason given."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(str(reason))
        self.code = reason.code
        self.status = _STATUS_BY_CODE.get(reason.code, exit_codes.UNAVAILABLE)


@contextlib.contextmanager
def must_answer() -> Generator[None, None, None]:
    """Let a daemon that does not answer be an error of its own, with an exit status of its own."""
    try:
        yield
    except (Unavailable, DeadlineExceeded) as error:
        raise DaemonUnreachable(error) from None


@contextlib.contextmanager
def explain_denied(client: Client) -> Generator[None, None, None]:
    """Say of a refusal what may be its reason: nobody operates a daemon over ZeroMQ."""
    try:
        yield
    except PermissionDenied as error:
        if client.transport == "unix":
            raise
        hint = "weightctl has come over ZeroMQ; --socket unix:///PATH takes the unix socket"
        raise PermissionDenied(f"{error}; {hint}") from None


_STATUS_BY_CODE = {InvalidArgument.code: exit_codes.USAGE, PermissionDenied.code: exit_codes.NO_PERMISSION}


def check_model(status: StatusResponse, name: str) -> None:
    """Raise `NotFound`, with the models that exist, where none has this name."""
    names = [model.name for model in status.models]
    if name not in names:
        raise NotFound(f"no model {name!r}; there are: {', '.join(names) or 'none'}")
