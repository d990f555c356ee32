"""Properties of the table of stages."""

from __future__ import annotations

from weightd.daemon.models.stage import LOADS, STAGE, Stage, StageEvent


def reached(start: Stage) -> set[Stage]:
    found = {start}
    while more := {after for (stage, _), after in STAGE.items() if stage in found} - found:
        found |= more
    return found


def test_every_stage_is_reached_and_only_a_stop_is_final() -> None:
    assert reached(Stage.FIRST) == set(Stage)
    assert {stage for stage, _ in STAGE} == LOADS | {Stage.AWAY, Stage.FAILED} == set(Stage) - {Stage.STOPPING}
    assert {event for _, event in STAGE} == set(StageEvent)


def test_what_has_served_is_never_given_up_and_only_what_has_served_is_updated() -> None:
    assert reached(Stage.KEEPING) == {Stage.KEEPING, Stage.UPDATING, Stage.AWAY, Stage.STOPPING}
    assert (Stage.FIRST, StageEvent.UPDATE) not in STAGE
