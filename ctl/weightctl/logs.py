"""`weightctl logs`: what the processes of a model have written."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Iterator

from weightctl import exit_codes
from weightctl.command import Command, Connect, explain_denied
from weightctl.text import clean, count, local_time
from weightd_protocol import limits
from weightd_protocol.errors import NotFound
from weightd_protocol.messages.events import LogsResponse, LogTail

_DESCRIPTION = f"""\
Shows the ends of what the processes of MODEL have written: what the engine says, and tracebacks.
Those that have ended are among them, as long as their generation is there. Who has written last
comes last; of more than {limits.MAX_LOGS} the others are counted, and --process names one of them.

  weightctl logs resnet50
  weightctl logs resnet50 --process resnet50.1.w2 -n 1000

What the daemon says of them is in its own log: weightctl events MODEL.

Logs may tell of inputs. Only the daemon's own user and root, and tenants that may "operate", are
shown them, over its unix socket: not over ipc:// or tcp://.

--json prints one object, {{"logs": [{{"process", "generation", "size", "changed", "text"}}],
"omitted"}}.

Exit status: 0 good, 1 there is no such model or process, 77 this user may not connect."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the model's name, see weightctl models")
    parser.add_argument("--process", default="", metavar="NAME", help="only this one, see weightctl status")
    parser.add_argument(
        "-n",
        "--lines",
        type=_parse_lines,
        default=20,
        metavar="N",
        help="the most of each process (default: %(default)s)",
    )


def _parse_lines(argument: str) -> int:
    try:
        lines = int(argument)
    except ValueError:
        lines = 0
    if not 1 <= lines <= limits.MAX_LOG_LINES:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {limits.MAX_LOG_LINES:,}, got {argument!r}")
    return lines


def _run(options: argparse.Namespace, connect: Connect) -> int:
    with connect() as client, explain_denied(client):
        answer = client.logs(options.model, options.process, lines=options.lines)
        if options.process and not answer.logs:
            raise _no_log(options.process, client.logs(options.model, lines=1))
    if options.json:
        print(json.dumps({"logs": [dataclasses.asdict(each) for each in answer.logs], "omitted": answer.omitted}))
    else:
        print("\n".join(_format_logs(answer)))
    return exit_codes.OK


def _no_log(process: str, answer: LogsResponse) -> NotFound:
    """Return the error for a process that has no log, with those that have one."""
    available = ", ".join(sorted(clean(each.process) for each in answer.logs)) or "none"
    more = f" and {answer.omitted:,} more" if answer.omitted else ""
    return NotFound(f"no process {process!r} with a log; there are: {available}{more}")


def _format_logs(answer: LogsResponse) -> Iterator[str]:
    if not answer.logs:
        yield "no process has a log"
    if answer.omitted:
        yield f"{count(answer.omitted, 'process')} more that wrote before: --process shows one"
    for each in answer.logs:
        yield _heading(each)
        for line in each.text.splitlines():
            yield f"  {clean(line)}"


def _heading(log: LogTail) -> str:
    extent = f"{log.size:,} bytes, the last at {local_time(log.changed_at)}" if log.size else "nothing"
    return f"{clean(log.process)}: {extent}"


COMMAND = Command("show what the processes of a model have written", _DESCRIPTION, _add_arguments, _run)
