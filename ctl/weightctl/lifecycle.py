"""`weightctl load`, `unload`, `retry` and `restart`: load and unload models."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Callable

from weightctl import exit_codes
from weightctl.command import Command, CommandError, Connect, DaemonUnreachable, explain_denied
from weightctl.text import clean
from weightd.client import Client
from weightd_protocol.errors import DeadlineExceeded, RequestError
from weightd_protocol.messages.control import LOAD, RESTART, RETRY, LoadResponse

_PERMISSIONS = """\
Allowed for root, the daemon's own user, and tenants that may "load" or "operate"."""

_WAIT = """\
The command returns at once, and weightctl status shows the progress; with --wait it returns when
{end}, or after --timeout seconds (default: 30)."""

_STATUS = """\
Exit status: 0 done, 1 failed for at least one model, 75 not complete within --timeout."""

_LOAD = f"""\
Loads models that are not loaded. A model with load = "on_demand" is loaded by its first request,
too; one with load = "manual" only by this command. If the memory of models is limited
(max_model_bytes), idle models with load = "on_demand" are unloaded for the new one.

  weightctl load resnet50 bert --wait

{_WAIT.format(end="the models serve or have failed")}

{_PERMISSIONS}

{_STATUS}"""

_UNLOAD = f"""\
Unloads models. Further requests are refused, accepted ones are answered, and then the model's
processes end. A model with load = "on_demand" is loaded again by its next request. The next load
reads the model's files again.

{_WAIT.format(end="the processes have ended")}

{_PERMISSIONS}

{_STATUS}"""

_RETRY = f"""\
Loads models again that have failed. The daemon does so by itself if the cause may go away, such as
a full disk; weightctl status shows when. A reload retries failed models, too.

{_WAIT.format(end="the models serve or have failed")}

{_PERMISSIONS}

{_STATUS}"""

_RESTART = f"""\
Loads models from their files again, beside the versions that serve, and replaces these without
losing requests. Until then there are two copies of the weights.

{_WAIT.format(end="the new versions serve")}

Allowed for root, the daemon's own user, and tenants that may "operate", over the daemon's Unix
socket only.

{_STATUS}"""


class NotComplete(CommandError):
    """The operation did not complete within the timeout, but the daemon continues with it."""

    status = exit_codes.NOT_YET
    code = DeadlineExceeded.code


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name of a model")
    parser.add_argument("--wait", action="store_true", help="return when the operation is complete")


def _run(
    operation: Callable[[Client, str, bool], LoadResponse],
) -> Callable[[argparse.Namespace, Connect], int]:
    def run(options: argparse.Namespace, connect: Connect) -> int:
        status = exit_codes.OK
        results = {}
        with connect() as client:
            for model in options.models:
                try:
                    with explain_denied(client):
                        state = _perform(client, partial(operation, client, model, options.wait)).state
                except (RequestError, NotComplete) as error:
                    if len(options.models) == 1:
                        raise
                    status = exit_codes.ERROR
                    results[model] = {"error": str(error), "code": error.code}
                    if not options.json:
                        print(f"{clean(model)}: {clean(str(error))}")
                    continue
                results[model] = {"state": state}
                if not options.json:
                    print(f"{clean(model)}: {clean(state)}")
        if options.json:
            print(json.dumps(results))
        return status

    return run


def _perform(client: Client, call: Callable[[], LoadResponse]) -> LoadResponse:
    """Return the response; on a timeout, distinguish a long operation from a daemon that does not respond."""
    try:
        return call()
    except DeadlineExceeded as late:
        try:
            client.server()
        except RequestError:
            raise DaemonUnreachable(late) from None
        raise NotComplete(f"not complete after {client.timeout:g} s and continues; see `weightctl status`") from None


def _command(help_text: str, description: str, operation: Callable[[Client, str, bool], LoadResponse]) -> Command:
    return Command(help_text, description, _add_arguments, _run(operation))


LOAD_COMMAND = _command("load models", _LOAD, lambda client, model, wait: client.load(model, action=LOAD, wait=wait))
UNLOAD_COMMAND = _command("unload models", _UNLOAD, lambda client, model, wait: client.unload(model, wait=wait))
RETRY_COMMAND = _command(
    "load failed models again", _RETRY, lambda client, model, wait: client.load(model, action=RETRY, wait=wait)
)
RESTART_COMMAND = _command(
    "load models again without losing requests",
    _RESTART,
    lambda client, model, wait: client.load(model, action=RESTART, wait=wait),
)
