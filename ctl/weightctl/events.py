"""`weightctl events`: what has happened, as the daemon remembers it, and what happens."""

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
from weightctl.command import Command, Connect, DaemonUnreachable, check_model
from weightctl.text import clean, count, local_time
from weightd.client import Client
from weightd_protocol.errors import DeadlineExceeded, Unavailable
from weightd_protocol.messages.events import Event

_DESCRIPTION = """\
Shows what has happened: starts, loads, losses, updates, reloads, refusals; all of it, or what is
about MODEL. The daemon remembers the last 2,000 events, and 1 MB of them, since it began;
the journal of systemd has all (journalctl -u weightd).

  weightctl events
  weightctl events resnet50 --since 1h
  weightctl events --follow

--follow goes on, also over a restart of the daemon, until Ctrl-C: it asks once a second.

Where there are tenants, only those that may see the "status" of others are shown events.

--json prints one object, {"events": [{"number", "time", "severity", "text", "model", "generation",
"child"}], "missed"}, "missed" counting those that the daemon has forgotten; with --follow an object
a line for each event, {"number", ...}.

Exit status: 0 good, 1 there is neither such a model nor an event about it, 69 the daemon
cannot be reached, 130 Ctrl-C."""

_POLL_INTERVAL_S = 1.0

_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_SINCE = re.compile(r"([0-9]{1,9}) ?(s|min|h|d|)")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="only what is about this model")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens from now on")
    parser.add_argument(
        "--since",
        type=_parse_since,
        metavar="T",
        help="only of so long ago or later: 90s, 10min, 2h, 7d (default: all)",
    )
    parser.add_argument("-n", "--lines", type=_parse_lines, metavar="N", help="only the last N (default: all)")


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
    """What the daemon has told at once.

    Attributes:
        events: the oldest first.
        last_number: what to ask after next.
        missed: how many it has forgotten.
        has_events: whether it remembers any, those before `--since` included.
    """

    events: Deque[Event]
    last_number: int
    missed: int
    has_events: bool


def _run(options: argparse.Namespace, connect: Connect) -> int:
    since = 0.0 if options.since is None else time.time() - options.since
    with connect() as client:
        try:
            batch = _fetch(client, options.model, 0, since, options.lines)
            if options.model and not batch.has_events:
                check_model(client.status(), options.model)
        except (Unavailable, DeadlineExceeded) as error:
            raise DaemonUnreachable(error) from None
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
    """Show what happens, until Ctrl-C."""
    is_lost = False
    while True:
        time.sleep(_POLL_INTERVAL_S)
        try:
            batch = _fetch(client, options.model, after)
        except (Unavailable, DeadlineExceeded) as error:
            if not is_lost:
                print(f"{error.code}: {clean(str(error))}; it is asked again", file=sys.stderr)
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
        yield f"({count(batch.missed, 'event')} before that are forgotten)"
    for each in batch.events:
        yield json.dumps(dataclasses.asdict(each)) if as_json else _event_line(each)


def _event_line(event: Event) -> str:
    return f"{local_time(event.time)} {event.severity:<7} {clean(event.text)}"


COMMAND = Command("show what has happened, and what happens", _DESCRIPTION, _add_arguments, _run)
