"""Scripted lives of a unit: what it wants done after each event, exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from weightd.daemon.generations.actions import Action, Dismiss, Enlist, Pin, Role, Spawn
from weightd.daemon.generations.life import STOP_TIMEOUT_S
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import End

from .group import (
    BROKER,
    CONNECT_TIMEOUT_S,
    ENTER,
    LOAD_TIMEOUT_S,
    PREDICT_TIMEOUT_S,
    R0,
    R1,
    SEAT,
    STOP,
    WARM,
    Group,
    sends,
)

FOREVER = float("inf")


def test_a_whole_life(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    group = Group()
    unit, states = group.unit, GenerationState
    warm_timeout = CONNECT_TIMEOUT_S + PREDICT_TIMEOUT_S
    spawned: list[Action] = [Spawn(BROKER, Role.BROKER), Spawn(R0, Role.RANK), Spawn(R1, Role.RANK)]
    steps: list[tuple[Callable[[], list[Action]], list[Action], GenerationState, str, float]] = [
        (group.wanted, [Pin()], states.PINNING, "pinning", FOREVER),
        (group.pinned, spawned, states.SPAWNING, "spawned, 0/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R1), [], states.GATHERING, "spawned, 1/3 processes up", LOAD_TIMEOUT_S),
        (lambda: group.hello(R0), [], states.GATHERING, "spawned, 2/3 processes up", LOAD_TIMEOUT_S),
        (
            lambda: group.hello(BROKER),
            sends(ENTER, BROKER, R0, R1),
            states.BUILDING,
            "loading, 0/2 ranks have entered",
            LOAD_TIMEOUT_S,
        ),
        (lambda: group.entered(R1), [], states.BUILDING, "loading, 1/2 ranks have entered", LOAD_TIMEOUT_S),
        (lambda: group.entered(R0), sends(WARM, R0, R1), states.ATTACHING, "attaching 0/2", warm_timeout),
        (lambda: group.warmed(R0), [], states.ATTACHING, "attaching 1/2", warm_timeout),
        (lambda: group.warmed(R1), [Enlist(SEAT)], states.SERVING, "serving", FOREVER),
        (lambda: group.after(1e6), [], states.SERVING, "serving", FOREVER),
        (group.drain, [Dismiss(SEAT), *sends(STOP, R0, R1)], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R1, end=End(0)), [], states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(R0, end=End(0)), sends(STOP, BROKER), states.DRAINING, "draining", STOP_TIMEOUT_S),
        (lambda: group.exits(BROKER, end=End(0)), [], states.GONE, "gone", FOREVER),
    ]
    for event, wanted, state, progress, wait in steps:
        assert not unit.ended
        assert (event(), group.state) == (wanted, state)
        assert (unit.progress, unit.next_tick - group.now) == (progress, wait)
        assert unit.seats == ({SEAT: (R0, R1)} if state is states.SERVING else {})
    assert (unit.ended, unit.cause, unit.deaths) == (True, "", 0)
    lines = [record.getMessage() for record in caplog.records]
    assert [lines.count(f"m.7: {progress}") for *_, progress, _ in steps] == [1] * len(steps)
