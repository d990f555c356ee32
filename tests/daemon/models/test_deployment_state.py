"""Properties of the table of stages."""

from __future__ import annotations

from weightd_daemon.models.deployment_state import (
    DEPLOYMENT_TRANSITIONS,
    LOADING_STATES,
    DeploymentEvent,
    DeploymentState,
)


def reached(start: DeploymentState) -> set[DeploymentState]:
    found = {start}
    while more := {after for (stage, _), after in DEPLOYMENT_TRANSITIONS.items() if stage in found} - found:
        found |= more
    return found


def test_every_stage_is_reached_and_only_a_stop_is_final() -> None:
    assert reached(DeploymentState.INITIAL) == set(DeploymentState)
    assert (
        {stage for stage, _ in DEPLOYMENT_TRANSITIONS}
        == LOADING_STATES | {DeploymentState.VACATED, DeploymentState.FAILED}
        == set(DeploymentState) - {DeploymentState.STOPPING}
    )
    assert {event for _, event in DEPLOYMENT_TRANSITIONS} == set(DeploymentEvent)


def test_what_has_served_is_never_given_up_and_only_what_has_served_is_updated() -> None:
    assert reached(DeploymentState.ESTABLISHED) == {
        DeploymentState.ESTABLISHED,
        DeploymentState.UPDATING,
        DeploymentState.VACATED,
        DeploymentState.STOPPING,
    }
    assert (DeploymentState.INITIAL, DeploymentEvent.UPDATE) not in DEPLOYMENT_TRANSITIONS
