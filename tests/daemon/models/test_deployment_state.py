"""Properties of the transition table of deployments."""

from __future__ import annotations

from weightd_daemon.models.deployment_state import (
    DEPLOYMENT_TRANSITIONS,
    LOADING_STATES,
    DeploymentEvent,
    DeploymentState,
)


def reachable(start: DeploymentState, without: DeploymentEvent | None = None) -> set[DeploymentState]:
    found, transitions = {start}, DEPLOYMENT_TRANSITIONS.items()
    while more := {after for (state, event), after in transitions if state in found and event is not without} - found:
        found |= more
    return found


def test_all_states_are_reachable_and_only_stop_is_final() -> None:
    assert reachable(DeploymentState.UNLOADED) == set(DeploymentState)
    assert (
        {state for state, _ in DEPLOYMENT_TRANSITIONS}
        == LOADING_STATES | {DeploymentState.VACATED, DeploymentState.FAILED, DeploymentState.UNLOADED}
        == set(DeploymentState) - {DeploymentState.STOPPING}
    )
    assert {event for _, event in DEPLOYMENT_TRANSITIONS} == set(DeploymentEvent)


def test_established_deployment_never_fails_unless_it_is_unloaded() -> None:
    assert reachable(DeploymentState.ESTABLISHED, without=DeploymentEvent.UNLOAD) == {
        DeploymentState.ESTABLISHED,
        DeploymentState.UPDATING,
        DeploymentState.VACATED,
        DeploymentState.STOPPING,
    }
    assert (DeploymentState.INITIAL, DeploymentEvent.UPDATE) not in DEPLOYMENT_TRANSITIONS
