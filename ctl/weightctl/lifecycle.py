"""The commands `weightctl load`, `unload`, `retry` and `restart`, which load and unload models."""

from __future__ import annotations

import argparse
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, NotComplete, operation_on
from weightctl.text import clean
from weightd.client import Client
from weightd_protocol.errors import RequestError
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

_UNLOAD_NAME = "unload"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name of a model")
    parser.add_argument("--wait", action="store_true", help="return when the operation is complete")


def _command(help_text: str, description: str, command: str) -> Command:
    def run(options: argparse.Namespace, connect: Connect) -> int:
        with connect() as client:
            return _run(client, options, command)

    return Command(help_text, description, _add_arguments, run)


def _run(client: Client, options: argparse.Namespace, command: str) -> int:
    """Execute a command for each of the models. After an error, continue with the next model.

    If the command names only one model, the error of this model is raised.
    """
    statuses = {exit_codes.OK}
    results = {}
    for model in options.models:
        try:
            with operation_on(client, model, command):
                state = _send(client, model, command, options.wait).state
        except (RequestError, NotComplete) as error:
            if len(options.models) == 1:
                raise
            statuses.add(exit_codes.NOT_YET if isinstance(error, NotComplete) else exit_codes.ERROR)
            results[model] = {"error": str(error), "code": error.code}
            line = str(error)
        else:
            results[model] = {"state": state}
            line = f"{model}: {state}"
        if not options.json:
            print(clean(line))
    if options.json:
        print(json.dumps(results))
    return exit_codes.ERROR if exit_codes.ERROR in statuses else max(statuses)


def _send(client: Client, model: str, command: str, wait: bool) -> LoadResponse:
    if command == _UNLOAD_NAME:
        return client.unload(model, wait=wait)
    return client.load(model, action=command, wait=wait)


LOAD_COMMAND = _command("load models", _LOAD, LOAD)
UNLOAD_COMMAND = _command("unload models", _UNLOAD, _UNLOAD_NAME)
RETRY_COMMAND = _command("load failed models again", _RETRY, RETRY)
RESTART_COMMAND = _command("load models again without losing requests", _RESTART, RESTART)
