"""The schedule is a function of the seed."""

from __future__ import annotations

import pytest

from .kinds import ALL, BEHAVIOUR, LETHAL, Fault, UnknownFaultError, parse, text_of
from .schedule import CALM_S, LAST_RESTART, MAX_BLOWS, Target, plan

MODELS = [Target("a", dense=True), Target("b", dense=False), Target("c", dense=True, cut=True)]
CHOSEN = frozenset({Fault.KILL_WORKER, Fault.FLOOD, Fault.RELOAD})


@pytest.mark.parametrize("seed", range(5))
def test_what_every_schedule_is(seed: int) -> None:
    events = plan(seed, 300, ALL, MODELS)
    assert events == plan(seed, 300, ALL, MODELS)
    assert events != plan(seed + 1, 300, ALL, MODELS)
    assert events == sorted(events, key=lambda event: event.at)
    # Only what was chosen strikes, and all of it.
    assert {event.fault for event in events} == ALL - BEHAVIOUR
    assert {event.fault for event in plan(seed, 300, CHOSEN, MODELS)} == CHOSEN
    assert plan(seed, 300, [], MODELS) == []
    # Ranks alone have a broker, and no page store.
    assert {event.model for event in events if event.fault is Fault.KILL_BROKER} == {"c"}
    assert {event.model for event in events if event.fault is Fault.TRUNCATE_STORE} == {"a", "b"}
    # A damage that may stay unnoticed is done to no model.
    assert {event.model for event in events if event.fault is Fault.OVERWRITE_STORE} == {"a"}
    # A model that was struck hard gets time to recover.
    for model in MODELS:
        times = [event.at for event in events if event.fault in LETHAL and event.model == model.name]
        assert times
        assert all(later - first >= CALM_S for first, later in zip(times, times[MAX_BLOWS:], strict=False))


@pytest.mark.parametrize("seed", range(5))
def test_a_minute_has_every_fault_that_needs_no_worker_and_its_last_daemon_grows_old(seed: int) -> None:
    events = plan(seed, 60, ALL, MODELS)
    assert all(0 <= event.at < 60 for event in events)
    assert {event.fault for event in events} >= ALL - BEHAVIOUR - LETHAL
    assert max(event.at for event in events if event.fault is Fault.KILL_DAEMON) < LAST_RESTART * 60


@pytest.mark.parametrize("faults", [ALL, {Fault.FLOOD}, {Fault.FLOOD, Fault.KILL_DAEMON}])
def test_faults_are_named_on_the_command_line(faults: frozenset[Fault]) -> None:
    assert parse(text_of(faults)) == faults
    assert parse(f"all,-flood,{text_of(faults)}") == ALL - {Fault.FLOOD} | faults


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(UnknownFaultError, match="no fault earthquake; there are: all, kill-worker"):
        parse("flood,earthquake")
