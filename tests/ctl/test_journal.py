"""Tests of `weightctl events` and `weightctl logs`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any, List, Sequence, Tuple

import pytest

from testkit import looks
from testkit.fakedaemon import FakeDaemon, silent
from weightctl import exit_codes
from weightctl.text import local_time
from weightd_protocol.codec import encode
from weightd_protocol.errors import Unavailable
from weightd_protocol.messages.events import Event, Events, EventsResponse, Logs, LogsResponse, LogTail
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import ClientMessage

from .conftest import Ctl, fails

NOW = time.time()
OLD = Event(5, NOW - 7200, "info", "m.1: serving", "m", 1)
NEW = Event(6, NOW - 60, "warning", "m.1.w1 lost:\x1b[2J killed", "m", 1, "m.1.w1")


def event_pages(*pages: Tuple[Tuple[Event, ...], int, int]) -> Any:
    """Return a handler that replies with these pages of events and their numbers of omitted and discarded events.

    The last page is repeated.
    """
    left = list(pages)

    def handle(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
        assert isinstance(message, Events)
        events, more, missed = left.pop(0) if len(left) > 1 else left[0]
        last = events[-1].number if events else message.after
        return [encode(EventsResponse(message.id, events, last, more, missed))]

    return handle


def test_events_have_a_line_each(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = event_pages(((OLD,), 1, 4), ((NEW,), 0, 0))
    ran = ctl("events", "m")
    assert ran.out.splitlines() == [
        "(4 events before these were discarded)",
        f"{local_time(OLD.time)} info    m.1: serving",
        f"{local_time(NEW.time)} warning m.1.w1 lost:\\x1b[2J killed",
    ]
    asked = [daemon.next()[0] for _ in range(2)]
    assert [(each.after, each.model_name) for each in asked if isinstance(each, Events)] == [(0, "m"), (5, "m")]


@pytest.mark.parametrize("more", [["--since", "1h"], ["--since=4000"], ["-n", "1"]])
def test_recent_events(ctl: Ctl, daemon: FakeDaemon, more: List[str]) -> None:
    daemon.handle = event_pages(((OLD, NEW), 0, 0))
    result = json.loads(ctl("events", "--json", *more).out)
    assert [each["number"] for each in result["events"]] == [6]
    assert (result["events"][0]["child"], result["missed"]) == ("m.1.w1", 0)


def test_follows_events_across_restart(
    ctl: Ctl, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: List[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        gone = fails(Unavailable.code, "it restarts")
        daemon.handle = {1: gone, 2: gone, 3: event_pages(((NEW,), 0, 0)), 4: event_pages(((), 0, 0))}.get(
            len(pauses), gone
        )
        if len(pauses) > 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("weightctl.journal.time.sleep", sleep)
    daemon.handle = event_pages(((OLD,), 0, 0))
    ran = ctl("events", "--follow", "--json")
    assert ran.status == exit_codes.INTERRUPTED
    assert [json.loads(line)["number"] for line in ran.out.splitlines()] == [5, 6]
    assert ran.err == "UNAVAILABLE: it restarts; retrying\n"


def test_daemon_without_events(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    assert ctl("events", "--timeout", "0.05").status == exit_codes.UNAVAILABLE
    daemon.handle = fails("PERMISSION_DENIED", "not you")
    assert ctl("events") == (exit_codes.ERROR, "", "PERMISSION_DENIED: not you\n")


LOG = LogTail("m.1.w1", 1, 24_000, NOW, "first\n\x1b[2Jsecond\n")


def test_logs_have_process_names(ctl: Ctl, daemon: FakeDaemon) -> None:
    empty = LogTail("m.1.holder", 1, 0, NOW, "")
    daemon.handle = lambda message, _: [encode(LogsResponse(message.id, (empty, LOG), 2))]
    assert ctl("logs", "m", "--process", "p", "-n", "7").out.splitlines() == [
        "2 processes with older output omitted; use --process to show one",
        "m.1.holder: no output",
        f"m.1.w1: 24,000 bytes, last written at {local_time(NOW)}",
        "  first",
        "  \\x1b[2Jsecond",
    ]
    asked, _ = daemon.next()
    assert isinstance(asked, Logs)
    assert (asked.model_name, asked.process, asked.lines) == ("m", "p", 7)
    result = json.loads(ctl("logs", "m", "--json").out)
    assert (result["logs"][1]["text"], result["omitted"]) == (LOG.text, 2)
    daemon.handle = lambda message, _: [encode(LogsResponse(message.id, ()))]
    assert ctl("logs", "m").out == "no process has output\n"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_unknown_process_lists_processes(ctl: Ctl, daemon: FakeDaemon, more: List[str]) -> None:
    def tails(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
        assert isinstance(message, Logs)
        return [
            encode(LogsResponse(message.id, () if message.process else (LOG, replace(LOG, process="m.1.holder")), 3))
        ]

    daemon.handle = tails
    ran = ctl("logs", "m", "--process", "w9", *more)
    assert ran.status == exit_codes.ERROR
    error = json.loads(ran.out)["error"]["text"] if more else ran.err.strip().partition("NOT_FOUND: ")[2]
    assert error == "no process 'w9' with output; there are: m.1.holder, m.1.w1 and 3 more"


def test_unknown_model_lists_models(ctl: Ctl, daemon: FakeDaemon) -> None:
    status = looks.status(1.0, looks.model("resnet"))

    def handle(message: ClientMessage, frames: Sequence[bytes]) -> List[List[Any]]:
        if isinstance(message, Status):
            return [encode(replace(status, id=message.id))]
        return list(event_pages(((), 0, 0))(message, frames))

    daemon.handle = handle
    assert ctl("events", "resnte") == (exit_codes.ERROR, "", "NOT_FOUND: no model 'resnte'; there are: resnet\n")
    assert ctl("events", "resnet") == (exit_codes.OK, "", "")


def test_shows_events_of_removed_model(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = event_pages(((OLD,), 0, 0))
    assert ctl("events", "m", "--since", "1h") == (exit_codes.OK, "", "")


@pytest.mark.parametrize("arguments", ["logs m -n 0", "logs m -n x", "events --since 1w", "events -n 0"])
def test_invalid_command_line(alone: Ctl, arguments: str) -> None:
    ran = alone(*arguments.split())
    assert (ran.status, ran.out) == (exit_codes.USAGE, "")
    assert ", got '" in ran.err
