"""The commands `weightctl events` and `weightctl logs`: events of the daemon, and output of its child processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections import deque
from typing import Deque, Iterator, NamedTuple, Optional

from weightctl import exit_codes
from weightctl.command import Command, Connect, explain_denied, filter_model, must_answer
from weightctl.text import clean, count, local_time
from weightd.client import Client
from weightd_protocol import limits
from weightd_protocol.errors import DeadlineExceeded, NotFound, Unavailable
from weightd_protocol.messages.events import Event, LogsResponse, LogTail

_EVENTS_DESCRIPTION = """\
Shows the daemon's events: starts, loads, crashes, updates, reloads and refusals, of all models or
of MODEL. The daemon keeps the last 2,000 events since its start, up to 1 MB; the systemd
journal keeps all (journalctl -u weightd).

  weightctl events
  weightctl events resnet50 --since 1h
  weightctl events --follow

--follow continues with new events until Ctrl-C, also over a restart of the daemon. It polls once a
second.

If tenants are configured, only tenants that may see the "status" of others can see events.

--json prints one object, {"events": [{"number", "time", "severity", "text", "model", "generation",
"child"}], "missed"}, where "missed" counts discarded events; with --follow, one object per line
for each event, {"number", ...}.

Exit status: 0 good, 1 there is neither such a model nor an event about it, 69 the daemon cannot be
reached, 130 Ctrl-C."""

_POLL_INTERVAL_S = 1.0

_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_SINCE = re.compile(r"([0-9]{1,9}) ?(s|min|h|d|)")


def _add_event_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="only events of this model")
    parser.add_argument("-f", "--follow", action="store_true", help="print new events until Ctrl-C")
    parser.add_argument(
        "--since",
        type=_parse_since,
        metavar="T",
        help="only events of the last 90s, 10min, 2h or 7d, for example (default: all)",
    )
    parser.add_argument("-n", "--lines", type=_parse_lines, metavar="N", help="only the last N events (default: all)")


def _parse_since(argument: str) -> float:
    found = _SINCE.fullmatch(argument)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10min, 2h or 7d, got {argument!r}")
    return float(int(found[1]) * _UNITS[found[2]])


def _parse_lines(argument: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", argument):
        raise argparse.ArgumentTypeError(f"expected a number of events, got {argument!r}")
    return int(argument)


class EventBatch(NamedTuple):
    """Events that were fetched with one or more requests.

    Attributes:
        events: the events, oldest first.
        last_number: the number of the last examined event, after which the next request continues.
        missed: the number of requested events that the daemon had discarded.
        has_events: whether the daemon has any matching events, including those older than `--since`.
    """

    events: Deque[Event]
    last_number: int
    missed: int
    has_events: bool


def _show_events(options: argparse.Namespace, connect: Connect) -> int:
    since = 0.0 if options.since is None else time.time() - options.since
    with connect() as client:
        with must_answer():
            batch = _fetch(client, options.model, 0, since, options.lines)
            if options.model and not batch.has_events:
                filter_model(client.status(), options.model)
        if options.json and not options.follow:
            print(json.dumps({"events": [dataclasses.asdict(each) for each in batch.events], "missed": batch.missed}))
        else:
            _print_batch(options, batch)
        if options.follow:
            _follow(client, options, batch.last_number)
    return exit_codes.OK


def _fetch(client: Client, model: str, after: int, since: float = 0.0, max_events: Optional[int] = None) -> EventBatch:
    events: Deque[Event] = deque(maxlen=max_events)
    missed, some = 0, False
    while True:
        answer = client.events(after, model)
        events.extend(each for each in answer.events if each.time >= since)
        missed += answer.missed
        some = some or bool(answer.events)
        after = answer.last
        if not answer.remaining:
            return EventBatch(events, after, missed, some)


def _follow(client: Client, options: argparse.Namespace, after: int) -> None:
    """Print new events until Ctrl-C. While the daemon cannot be reached, keep trying."""
    is_lost = False
    while True:
        time.sleep(_POLL_INTERVAL_S)
        try:
            batch = _fetch(client, options.model, after)
        except (Unavailable, DeadlineExceeded) as error:
            if not is_lost:
                print(f"{error.code}: {clean(str(error))}; retrying", file=sys.stderr)
            is_lost = True
            continue
        is_lost = False
        after = batch.last_number
        _print_batch(options, batch)


def _print_batch(options: argparse.Namespace, batch: EventBatch) -> None:
    for line in _format_events(batch, as_json=options.json):
        print(line)
    sys.stdout.flush()


def _format_events(batch: EventBatch, *, as_json: bool) -> Iterator[str]:
    if batch.missed and not as_json:
        yield f"({count(batch.missed, 'event')} before these were discarded)"
    for each in batch.events:
        yield json.dumps(dataclasses.asdict(each)) if as_json else _event_line(each)


def _event_line(event: Event) -> str:
    return f"{local_time(event.time)} {event.severity:<7} {clean(event.text)}"


EVENTS_COMMAND = Command(
    "show past and new events of the daemon", _EVENTS_DESCRIPTION, _add_event_arguments, _show_events
)


_LOGS_DESCRIPTION = f"""\
Shows the last lines of the output of MODEL's processes: messages of the engine and tracebacks. It
includes exited processes as long as their generation exists. The most recent output comes last. If
there are more than {limits.MAX_LOGS} processes, the others are only counted; --process selects one
of them.

  weightctl logs resnet50
  weightctl logs resnet50 --process resnet50.1.w2 -n 1000

For the daemon's messages about these processes, use weightctl events MODEL.

Output may contain request data. Only root, the daemon's own user, and tenants that may "operate"
can read it, over the daemon's Unix socket only, not over ipc:// or tcp://.

--json prints one object, {{"logs": [{{"process", "generation", "size", "changed", "text"}}],
"omitted"}}.

Exit status: 0 good, 1 there is no such model or process, 77 this user may not connect."""


def _add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    parser.add_argument("--process", default="", metavar="NAME", help="only this process, as shown by weightctl status")
    parser.add_argument(
        "-n",
        "--lines",
        type=_parse_log_lines,
        default=20,
        metavar="N",
        help="maximum number of lines per process (default: %(default)s)",
    )


def _parse_log_lines(argument: str) -> int:
    try:
        lines = int(argument)
    except ValueError:
        lines = 0
    if not 1 <= lines <= limits.MAX_LOG_LINES:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {limits.MAX_LOG_LINES:,}, got {argument!r}")
    return lines


def _show_logs(options: argparse.Namespace, connect: Connect) -> int:
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
    """Return the error for a process without a log. The error text lists the processes that have a log."""
    available = ", ".join(sorted(clean(each.process) for each in answer.logs)) or "none"
    more = f" and {answer.omitted:,} more" if answer.omitted else ""
    return NotFound(f"no process {process!r} with output; there are: {available}{more}")


def _format_logs(answer: LogsResponse) -> Iterator[str]:
    if not answer.logs:
        yield "no process has output"
    if answer.omitted:
        yield f"{count(answer.omitted, 'process')} with older output omitted; use --process to show one"
    for each in answer.logs:
        yield _log_heading(each)
        for line in each.text.splitlines():
            yield f"  {clean(line)}"


def _log_heading(log: LogTail) -> str:
    extent = f"{log.size:,} bytes, last written at {local_time(log.changed_at)}" if log.size else "no output"
    return f"{clean(log.process)}: {extent}"


LOGS_COMMAND = Command("show the output of a model's processes", _LOGS_DESCRIPTION, _add_log_arguments, _show_logs)
