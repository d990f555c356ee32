"""The schedule of faults as a function of the seed."""

from __future__ import annotations

import pytest

from .kinds import ALL, BEHAVIOUR, LETHAL, Fault, UnknownFaultError, parse, text_of
from .schedule import CALM_S, LAST_RESTART, MAX_BLOWS, Target, plan

MODELS = [Target("a", dense=True), Target("b", dense=False), Target("c", dense=True, cut=True)]
CHOSEN = frozenset({Fault.KILL_WORKER, Fault.FLOOD, Fault.RELOAD})


@pytest.mark.parametrize("seed", range(5))
def test_schedule_properties(seed: int) -> None:
    events = plan(seed, 300, ALL, MODELS)
    assert events == plan(seed, 300, ALL, MODELS)
    assert events != plan(seed + 1, 300, ALL, MODELS)
    assert events == sorted(events, key=lambda event: event.at)
    # All chosen faults strike, and no others.
    assert {event.fault for event in events} == ALL - BEHAVIOUR
    assert {event.fault for event in plan(seed, 300, CHOSEN, MODELS)} == CHOSEN
    assert plan(seed, 300, [], MODELS) == []
    # Only models on ranks have a broker; only the others have page stores.
    assert {event.model for event in events if event.fault is Fault.KILL_BROKER} == {"c"}
    assert {event.model for event in events if event.fault is Fault.TRUNCATE_STORE} == {"a", "b"}
    # Damage that may stay unnoticed is not done to any model.
    assert {event.model for event in events if event.fault is Fault.OVERWRITE_STORE} == {"a"}
    # After several faults in a row, a model has time to recover.
    for model in MODELS:
        times = [event.at for event in events if event.fault in LETHAL and event.model == model.name]
        assert times
        assert all(later - first >= CALM_S for first, later in zip(times, times[MAX_BLOWS:], strict=False))


@pytest.mark.parametrize("seed", range(5))
def test_minute_has_all_faults_and_no_late_restart(seed: int) -> None:
    events = plan(seed, 60, ALL, MODELS)
    assert all(0 <= event.at < 60 for event in events)
    assert {event.fault for event in events} >= ALL - BEHAVIOUR - LETHAL
    assert max(event.at for event in events if event.fault is Fault.KILL_DAEMON) < LAST_RESTART * 60


@pytest.mark.parametrize("faults", [ALL, {Fault.FLOOD}, {Fault.FLOOD, Fault.KILL_DAEMON}])
def test_parses_its_own_fault_lists(faults: frozenset[Fault]) -> None:
    assert parse(text_of(faults)) == faults
    assert parse(f"all,-flood,{text_of(faults)}") == ALL - {Fault.FLOOD} | faults


def test_rejects_unknown_fault() -> None:
    with pytest.raises(UnknownFaultError, match="no fault earthquake; there are: all, kill-worker"):
        parse("flood,earthquake")
