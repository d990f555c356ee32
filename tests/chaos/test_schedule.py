"""The schedule is a function of the seed."""

from __future__ import annotations

import pytest

from .kinds import ALL, BASIC, BEHAVIOUR, LETHAL, Fault, UnknownFaultError, parse, text_of
from .schedule import CALM_S, LAST_RESTART, MAX_BLOWS, Target, plan

MODELS = [Target("a", dense=True), Target("b", dense=False)]
SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_schedule(seed: int) -> None:
    assert plan(seed, 300, ALL, MODELS) == plan(seed, 300, ALL, MODELS)
    assert plan(seed, 300, ALL, MODELS) != plan(seed + 1, 300, ALL, MODELS)


@pytest.mark.parametrize("seed", SEEDS)
def test_events_come_in_the_order_of_time_and_before_the_end(seed: int) -> None:
    times = [event.at for event in plan(seed, 60, ALL, MODELS)]
    assert times == sorted(times)
    assert all(0 <= at < 60 for at in times)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_was_chosen_strikes(seed: int) -> None:
    assert {event.fault for event in plan(seed, 300, BASIC, MODELS)} == BASIC
    assert {event.fault for event in plan(seed, 300, ALL, MODELS)} == ALL - BEHAVIOUR
    assert plan(seed, 300, [], MODELS) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_that_was_struck_hard_gets_time_to_recover(seed: int) -> None:
    for model in MODELS:
        times = [
            event.at for event in plan(seed, 300, ALL, MODELS) if event.fault in LETHAL and event.model == model.name
        ]
        assert times
        for first, later in zip(times, times[MAX_BLOWS:], strict=False):
            assert later - first >= CALM_S


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_daemon_grows_old(seed: int) -> None:
    times = [event.at for event in plan(seed, 60, ALL, MODELS) if event.fault is Fault.KILL_DAEMON]
    assert times
    assert max(times) < LAST_RESTART * 60


@pytest.mark.parametrize("seed", SEEDS)
def test_a_minute_has_every_fault_that_needs_no_worker(seed: int) -> None:
    assert {event.fault for event in plan(seed, 60, ALL, MODELS)} >= ALL - BEHAVIOUR - LETHAL


def test_a_damage_that_may_stay_unnoticed_is_done_to_no_model() -> None:
    events = [event for seed in SEEDS for event in plan(seed, 300, ALL, MODELS)]
    assert {event.model for event in events if event.fault is Fault.OVERWRITE_STORE} == {"a"}


@pytest.mark.parametrize("faults", [ALL, BASIC, {Fault.FLOOD}, {Fault.FLOOD, Fault.KILL_DAEMON}])
def test_faults_are_named_on_the_command_line(faults: frozenset[Fault]) -> None:
    assert parse(text_of(faults)) == faults


def test_faults_can_be_left_out() -> None:
    assert parse("all,-flood,-basic,kill-daemon") == ALL - BASIC | {Fault.KILL_DAEMON}


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(UnknownFaultError, match="no fault earthquake; there are: all, basic, kill-worker"):
        parse("flood,earthquake")
