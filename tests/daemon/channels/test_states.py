"""The state table of a direct channel."""

from __future__ import annotations

import itertools

import pytest

from weightd_daemon.channels.states import CHANNEL_TRANSITIONS, READABLE, ChannelEvent, ChannelState
from weightd_daemon.generations.states import IllegalTransition, advance


@pytest.mark.parametrize(("state", "event"), [*itertools.product(ChannelState, ChannelEvent)])
def test_unlisted_transitions_are_illegal(state: ChannelState, event: ChannelEvent) -> None:
    if (state, event) in CHANNEL_TRANSITIONS:
        assert advance(CHANNEL_TRANSITIONS, state, event) is not state
    else:
        with pytest.raises(IllegalTransition):
            advance(CHANNEL_TRANSITIONS, state, event)


def reachable(state: ChannelState) -> set[ChannelState]:
    after = {each for (before, _), each in CHANNEL_TRANSITIONS.items() if before is state}
    return {state}.union(*map(reachable, after))


def test_every_channel_closes_and_none_opens_again() -> None:
    for state in ChannelState:
        assert ChannelState.CLOSED in reachable(state)
    assert reachable(ChannelState.CLOSED) == {ChannelState.CLOSED}
    assert ChannelState.OPEN not in set(CHANNEL_TRANSITIONS.values())


def test_no_channel_that_ends_is_read_again() -> None:
    for (before, _), after in CHANNEL_TRANSITIONS.items():
        assert not (before not in READABLE and after in READABLE)


# Workers may hold a descriptor.
HELD = {*ChannelState} - {ChannelState.DRAINED, ChannelState.CLOSED}


def test_a_held_channel_closes_only_after_its_release() -> None:
    for (before, event), after in CHANNEL_TRANSITIONS.items():
        if before in HELD and after not in HELD:
            assert event is ChannelEvent.RELEASED


def test_a_client_is_notified_after_the_queue_is_empty() -> None:
    closing = {
        (before, event) for (before, event), after in CHANNEL_TRANSITIONS.items() if after is ChannelState.CLOSED
    }
    assert {before for before, _ in closing} == {ChannelState.ABANDONED, ChannelState.DRAINED}
    assert {event for before, event in closing if before is not ChannelState.ABANDONED} == {
        ChannelEvent.EMPTIED,
        ChannelEvent.CLIENT_GONE,
    }
