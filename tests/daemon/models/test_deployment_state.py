"""Properties of the transition table of deployments."""

from __future__ import annotations

from weightd_daemon.models.deployment_state import (
    DEPLOYMENT_TRANSITIONS,
    LOADING_STATES,
    DeploymentEvent,
    DeploymentState,
)


def reachable(start: DeploymentState) -> set[DeploymentState]:
    found = {start}
    while more := {after for (state, _), after in DEPLOYMENT_TRANSITIONS.items() if state in found} - found:
        found |= more
    return found


def test_all_states_are_reachable_and_only_stop_is_final() -> None:
    assert reachable(DeploymentState.INITIAL) == set(DeploymentState)
    assert (
        {state for state, _ in DEPLOYMENT_TRANSITIONS}
        == LOADING_STATES | {DeploymentState.VACATED, DeploymentState.FAILED}
        == set(DeploymentState) - {DeploymentState.STOPPING}
    )
    assert {event for _, event in DEPLOYMENT_TRANSITIONS} == set(DeploymentEvent)


def test_established_deployment_never_fails() -> None:
    assert reachable(DeploymentState.ESTABLISHED) == {
        DeploymentState.ESTABLISHED,
        DeploymentState.UPDATING,
        DeploymentState.VACATED,
        DeploymentState.STOPPING,
    }
    assert (DeploymentState.INITIAL, DeploymentEvent.UPDATE) not in DEPLOYMENT_TRANSITIONS
