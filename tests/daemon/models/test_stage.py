"""Properties of the table of stages."""

from __future__ import annotations

from weightd.daemon.models.stage import LOADING_STATES, DEPLOYMENT_TRANSITIONS, Stage, StageEvent


def reached(start: Stage) -> set[Stage]:
    found = {start}
    while more := {after for (stage, _), after in DEPLOYMENT_TRANSITIONS.items() if stage in found} - found:
        found |= more
    return found


def test_every_stage_is_reached_and_only_a_stop_is_final() -> None:
    assert reached(Stage.INITIAL) == set(Stage)
    assert {stage for stage, _ in DEPLOYMENT_TRANSITIONS} == LOADING_STATES | {Stage.VACATED, Stage.FAILED} == set(Stage) - {Stage.STOPPING}
    assert {event for _, event in DEPLOYMENT_TRANSITIONS} == set(StageEvent)


def test_what_has_served_is_never_given_up_and_only_what_has_served_is_updated() -> None:
    assert reached(Stage.ESTABLISHED) == {Stage.ESTABLISHED, Stage.UPDATING, Stage.VACATED, Stage.STOPPING}
    assert (Stage.INITIAL, StageEvent.UPDATE) not in DEPLOYMENT_TRANSITIONS
