"""Properties of the table of stages."""

from __future__ import annotations

import itertools

import pytest

from weightd.daemon.generations.states import IllegalTransition, Machine
from weightd.daemon.models.stage import LOADS, STAGE, Stage, StageEvent


def reached(start: Stage) -> set[Stage]:
    found = {start}
    while more := {after for (stage, _), after in STAGE.items() if stage in found} - found:
        found |= more
    return found


def test_every_stage_is_reached_and_only_from_those_that_load_is_there_a_way_out() -> None:
    assert reached(Stage.FIRST) == set(Stage)
    assert {stage for stage, _ in STAGE} == LOADS == set(Stage) - {Stage.FAILED, Stage.STOPPING}
    assert {event for _, event in STAGE} == set(StageEvent)


def test_what_has_served_is_never_given_up_and_only_what_has_served_is_updated() -> None:
    assert Stage.FAILED not in reached(Stage.KEEPING)
    assert Stage.FIRST not in reached(Stage.KEEPING)
    assert (Stage.FIRST, StageEvent.UPDATE) not in STAGE


@pytest.mark.parametrize(
    ("stage", "event"), [each for each in itertools.product(Stage, StageEvent) if each not in STAGE]
)
def test_what_is_not_listed_raises(stage: Stage, event: StageEvent) -> None:
    with pytest.raises(IllegalTransition):
        Machine(STAGE, stage, "m", {}).advance(event)
