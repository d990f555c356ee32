"""weightctl(1) and its completion: what `--help` says, and what stands in no help."""

from __future__ import annotations

import argparse
from typing import Mapping

from weightctl import exit_codes
from weightd_common.manual import commands, completion
from weightd_common.manual.page import table, write_sections
from weightd_common.manual.roff import ManPage
from weightd_protocol.version import VERSION

# What the shell offers for a metavar.
_COMPLETIONS: Mapping[str, str] = {
    "MODEL": completion.MODEL,
    "NEW_PATH": completion.FILE,
    "WEIGHTS.npz": completion.FILE,
    "FILE.npz": completion.FILE,
    "[NAME=]FILE": completion.FILE,
    "FILE": completion.FILE,
    "DIR": completion.DIRECTORY,
}

ENVIRONMENT: Mapping[str, str] = {
    "WEIGHTD_SOCKET": "Where the daemon listens, unless --socket says so.",
    "XDG_RUNTIME_DIR": (
        "The runtime directory of this user's own daemon is weightd in it. If no daemon listens there, weightctl "
        "connects to the system's daemon."
    ),
}

FILES: Mapping[str, str] = {
    "/run/weightd/weightd.sock.unix": "Where the system's daemon listens.",
    "/run/weightd/weightd.sock": "The same for ZeroMQ.",
}


def page(parser: argparse.ArgumentParser) -> str:
    """Return weightctl(1), made from what reads the command line."""
    page = ManPage("weightctl", 1, VERSION, "ask a running weightd, and change what it serves")
    # The epilog of the help is a short form of the statuses below.
    write_sections(page, commands.read_parser(parser)._replace(epilog=""))
    page.heading("EXIT STATUS")
    table(page, ([str(status), meaning] for status, meaning in exit_codes.MEANINGS.items()))
    for heading, rows in (("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        page.heading(heading)
        table(page, ([term, meaning] for term, meaning in rows.items()))
    page.see_also([("weightd", 8), ("weightd.toml", 5)])
    return page.source()


def bash_completion(parser: argparse.ArgumentParser) -> str:
    """Return the completion of weightctl for bash."""
    return completion.bash_script(commands.read_parser(parser), _COMPLETIONS)
