"""`weightctl reload`: have the configuration file read again."""

from __future__ import annotations

import argparse
import json

from weightctl import exit_codes
from weightctl.command import Command, Connect, explain_denied
from weightctl.text import clean

_DESCRIPTION = """\
Has the daemon read its configuration file again, as SIGHUP does, and no request is lost: new models
load; one that has changed is loaded beside the one that serves and takes over once it serves; one
that is removed finishes what it has accepted, and leaves; one that has failed is loaded again. A
file that is wrong changes nothing, and the error says why.

This returns once the file is in force. weightctl status shows how the loading goes: a change that
fails leaves the model as it was, with the cause beside it.

Only the daemon's own user, root, and tenants that may "operate" every model may do this, over
the daemon's unix socket: not over ipc:// or tcp://.

Exit status: 0 the file is in force, 1 nothing has changed."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, explain_denied(client):
        answer = client.reload()
    changes = {
        "added": answer.added,
        "changed": answer.changed,
        "removed": answer.removed,
        "retried": answer.retried,
    }
    if options.json:
        print(json.dumps({what: list(names) for what, names in changes.items()}))
        return exit_codes.OK
    for what, names in changes.items():
        if names:
            print(f"{what}: {', '.join(map(clean, names))}")
    if not any(changes.values()):
        print("no model changes")
    return exit_codes.OK


COMMAND = Command("have the configuration file read again", _DESCRIPTION, _add_arguments, _run)
