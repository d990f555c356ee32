"""The command `weightctl rollout`: changes the shares of the requests that the versions of a model answer."""

from __future__ import annotations

import argparse
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, explain_denied
from weightctl.text import clean
from weightd_protocol.messages.control import ABORT, PROMOTE, SET_SHARE, RolloutResponse

_DESCRIPTION = """\
Changes which versions of a model answer the requests that name no version. The configuration of the
model has a table of versions.

  weightctl rollout resnet50 2 --percent 10    send a tenth of the requests to version 2
  weightctl rollout resnet50 2 --promote       send all requests to version 2
  weightctl rollout resnet50 --abort           return to the shares in the configuration

The other versions keep their proportions. The id of a request decides which version answers it.
Requests to resnet50@2 always go to version 2.

A restart of the machine ends a rollout. To keep it, set traffic in the configuration of the model.

Allowed for root, the daemon's own user, and tenants that may "operate", over the daemon's Unix
socket only.

Exit status: 0 done, 1 failed."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model, without a version")
    parser.add_argument("version", nargs="?", type=int, default=0, metavar="VERSION", help="number of the version")
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--percent", type=float, metavar="P", help="percentage of the requests for VERSION, 0 to 100")
    actions.add_argument("--promote", action="store_true", help="send all requests to VERSION")
    actions.add_argument("--abort", action="store_true", help="return to the shares in the configuration")


def _run(options: argparse.Namespace, connect: Connect) -> int:
    if options.abort == bool(options.version):
        options.fail("expected no VERSION with --abort" if options.abort else "expected VERSION")
    if options.percent is not None and not 0.0 <= options.percent <= 100.0:
        options.fail(f"--percent: expected 0 to 100, got {options.percent:g}")
    action = ABORT if options.abort else PROMOTE if options.promote else SET_SHARE
    with connect() as client, explain_denied(client):
        response = client.rollout(options.model, action, options.version, options.percent or 0.0)
    _print(options, response)
    return exit_codes.OK


def _print(options: argparse.Namespace, response: RolloutResponse) -> None:
    if options.json:
        print(json.dumps({str(each.version): each.percent for each in response.shares}))
        return
    for each in response.shares:
        print(f"{clean(response.model_name)}@{each.version}: {each.percent:g} %")


COMMAND = Command("choose which version of a model answers requests", _DESCRIPTION, _add_arguments, _run)
