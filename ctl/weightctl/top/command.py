"""`weightctl top`: arguments, and the choice between the live screen and printed tables."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Optional

from weightctl import exit_codes
from weightctl.command import Command, Connect, must_answer
from weightctl.top.poller import Poller
from weightctl.top.screen import HELP, render_text
from weightctl.top.tables import MAX_DELAY_S, MIN_DELAY_S
from weightd_common.dashboard.overview import Overview, to_json_values

# Width without a terminal, so that no column is left out.
_WIDTH = 200

_DESCRIPTION = f"""\
Shows models, processes and tenants while they work: requests/s, what waits, latency, and memory:
one copy of the weights and what is beside it, against what as many plain processes would take.

  weightctl top
  weightctl top -d 5
  weightctl top | head
  weightctl --json top -n 60 >minute.jsonl

The keys:

{HELP}

plain is N x (private + copy): for each worker that shares weights, a copy of them, and what it has
in memory besides that is no file's, even if after a fork it has that in common with others.
Libraries do not count, for plain processes share them, too.

When the daemon does not answer, the last picture stays, with the time since then and the reason,
until it answers again.

Where the output is no terminal, or with -b, the tables are printed after one delay, and that is
all; with -n N, N times. --json prints an object on a line instead: {{"version", "state", "uptime_s",
"throughput", "memory", "models", "processes", "tenants"}}, in seconds, bytes, and requests/s.

Exit status: 0 it was shown, 69 the daemon cannot be reached, 130 Ctrl-C."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-d", "--delay", default=1.0, type=_parse_delay, metavar="S", help="seconds between two pictures (default: 1)"
    )
    parser.add_argument(
        "-n",
        "--count",
        type=_parse_count,
        metavar="N",
        help="end after so many pictures; 0 for no end (default: none on a screen, 1 where they are printed)",
    )
    parser.add_argument("-b", "--batch", action="store_true", help="print, even to a terminal")


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client:
        poller = Poller(client)
        first = _poll(poller)
        if options.batch or options.json or not _has_screen():
            _print_tables(poller, options)
        else:
            from weightctl.top import terminal  # noqa: PLC0415 - some Pythons lack curses

            terminal.show(poller, first, options.delay, options.count or None)
    return exit_codes.OK


def _poll(poller: Poller) -> Overview:
    with must_answer():
        return poller.poll()


def _has_screen() -> bool:
    """Return whether stdin and stdout are a terminal with the required capabilities."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        return False
    try:
        import curses  # noqa: PLC0415 - some Pythons lack it
    except ImportError:
        return False
    try:
        curses.setupterm()
    except curses.error:
        return False
    return curses.tigetstr("cup") is not None


def _print_tables(poller: Poller, options: argparse.Namespace) -> None:
    """Print tables or JSON objects. Rates need two polls, so the first output appears after one delay."""
    remaining: Optional[int] = 1 if options.count is None else options.count or None
    is_first = True
    while remaining is None or remaining > 0:
        time.sleep(options.delay)
        overview = _poll(poller)
        if options.json:
            print(json.dumps(to_json_values(overview)), flush=True)
        else:
            print(*([] if is_first else [""]), *render_text(overview, _width()), sep="\n", flush=True)
        is_first, remaining = False, None if remaining is None else remaining - 1


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH


def _parse_delay(argument: str) -> float:
    try:
        delay_s = float(argument)
    except ValueError:
        delay_s = 0.0
    if not MIN_DELAY_S <= delay_s <= MAX_DELAY_S:
        raise argparse.ArgumentTypeError(f"expected {MIN_DELAY_S:g} to {MAX_DELAY_S:g} seconds, got {argument!r}")
    return delay_s


def _parse_count(argument: str) -> int:
    if not (argument.isascii() and argument.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {argument!r}")
    return int(argument)


COMMAND = Command("show models, processes and tenants while they work", _DESCRIPTION, _add_arguments, _run)
