"""`weightctl health`: whether requests would be answered, for monitors and scripts."""

from __future__ import annotations

import argparse
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, DaemonUnreachable
from weightctl.text import clean
from weightd_protocol.errors import DeadlineExceeded, Unavailable

_DESCRIPTION = """\
Tells whether MODEL, or without it every model, is ready: a worker of it has answered a request
or a ping within the watchdog's period. That its processes exist is not enough.

  weightctl health && echo good
  weightctl health resnet50

Exit status: 0 ready, 75 not ready, 69 the daemon cannot be reached or does not answer."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="", help="the model's name; without it, all of them"
    )


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        try:
            answer = client.ready(options.model)
        except (Unavailable, DeadlineExceeded) as error:
            raise DaemonUnreachable(error) from None
    if options.json:
        print(json.dumps({"model_name": options.model, "ready": answer.ready, "reason": answer.reason}))
    else:
        print("ready" if answer.ready else f"not ready: {clean(answer.reason)}")
    return exit_codes.OK if answer.ready else exit_codes.NOT_YET


COMMAND = Command("tell whether a model, or every one, would answer", _DESCRIPTION, _add_arguments, _run)
