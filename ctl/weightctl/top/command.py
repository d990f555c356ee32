"""The command `weightctl top`: its arguments, and the choice between the live screen and printed tables."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from textwrap import indent
from typing import Optional

from weightctl import exit_codes
from weightctl.command import Command, Connect, must_answer
from weightctl.top.poller import Poller
from weightctl.top.screen import KEYS, render_text
from weightctl.top.tables import MAX_DELAY_S, MIN_DELAY_S
from weightd_common.dashboard.overview import Overview, to_json_values

# Width of printed tables in characters if there is no terminal, so large that no column is left out.
_WIDTH = 200

_DESCRIPTION = """\
Shows models, processes and tenants live: requests/s, queues, latency, memory.

  weightctl top                        # interactive; h shows the keys
  weightctl top | head                 # print the tables once
  weightctl --json top -n 60           # print 60 JSON objects, one per line

See weightctl(1) for the keys, the memory estimate and the JSON output.

Exit status: 0 good, 69 the daemon cannot be reached, 130 Ctrl-C."""

_MANUAL = f"""\
If stdin and stdout are a terminal, the screen is updated until you quit. The keys:

{indent(KEYS, "  ")}

Rates and latencies cover the last 5 seconds. The daemon measures latency from the arrival of a
request to its response. Processes and memory are read every 10 seconds, and when processes have
changed. The column PROC shows ready and desired workers. MB is 10^6 bytes.

"memory" is one copy of the weights, the additional memory of the workers, and all other memory of
the service. "plain" estimates the memory of the same number of processes without sharing: N x
(private + copy). For each worker that shares weights, it counts a copy of the weights and the
worker's memory that is not backed by a file, even if the worker shares this memory with others
after a fork. Libraries are not counted, because plain processes share them, too.

While the daemon does not respond, the screen keeps the last values and shows their age and the
reason.

If the output is not a terminal, or with -b, the tables are printed once, after one delay; with -n
N, they are printed N times. --json prints one object per line instead: {{"version", "state",
"uptime_s", "throughput", "memory", "models", "processes", "tenants"}}, in seconds, bytes and
requests/s."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-d", "--delay", default=1.0, type=_parse_delay, metavar="S", help="seconds between updates (default: 1)"
    )
    parser.add_argument(
        "-n",
        "--count",
        type=_parse_count,
        metavar="N",
        help="updates until exit, 0: no limit (default: live 0, else 1)",
    )
    parser.add_argument("-b", "--batch", action="store_true", help="print the tables, even on a terminal")


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
    """Return whether stdin and stdout are a terminal on which the live screen can run."""
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
    """Print the tables, or JSON objects, once or repeatedly.

    Rates are computed from two polls, so the first output appears after one delay.
    """
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
        raise argparse.ArgumentTypeError(f"expected an integer, 0 or more, got {argument!r}")
    return int(argument)


COMMAND = Command("show live models, processes and tenants", _DESCRIPTION, _add_arguments, _run, _MANUAL)
