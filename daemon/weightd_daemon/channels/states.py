"""The states of a direct channel, with all legal transitions.

For a pair of state and event that the table does not list, `advance` raises `IllegalTransition`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from weightd_daemon.generations.states import Machine


class ChannelState(enum.Enum):
    """The state of a direct channel."""

    OPEN = "open"  # the client sends requests, and workers read them
    REVOKED = "revoked"  # the client cannot send any more; workers read and answer the queued requests
    RECLAIMED = (
        "reclaimed"  # as REVOKED, but workers stop reading: the daemon reads the queued requests and relays them
    )
    ABANDONED = "abandoned"  # the client has closed its end: workers stop reading, queued requests are discarded
    DRAINED = "drained"  # no worker holds the channel; the daemon reads the rest of the queue
    CLOSED = "closed"  # no process holds the workers' end, and the client has been notified


class ChannelEvent(enum.Enum):
    """An event that changes the state of a direct channel."""

    REVOKE = "revoke"  # the generation drains, its limits change, or a worker died while it took a request
    RIGHTS_CHANGE = "rights change"  # the client may not use the model any more
    EXPIRE = "expire"  # the expiry passed before the daemon renewed it
    STOP = "stop"  # a worker has stopped reading an open channel: it expired, was overdrawn or had an empty message
    SLOW_READER = "slow reader"  # the client does not read its answers
    END_GENERATION = "end generation"  # the generation has failed, or is ended without draining
    CLIENT_GONE = "client gone"  # the client has closed its end
    RELEASED = "released"  # no worker holds the channel any more: each has released it or has exited
    EMPTIED = "emptied"  # the daemon has found the queue empty


# Workers may read requests from the channel.
READABLE = frozenset({ChannelState.OPEN, ChannelState.REVOKED})

# The daemon reads the queue itself.
SELF_READ = frozenset({ChannelState.RECLAIMED, ChannelState.DRAINED})

_RECLAIMING_EVENTS = (
    ChannelEvent.RIGHTS_CHANGE,
    ChannelEvent.EXPIRE,
    ChannelEvent.SLOW_READER,
    ChannelEvent.END_GENERATION,
)

CHANNEL_TRANSITIONS: Mapping[tuple[ChannelState, ChannelEvent], ChannelState] = {
    (ChannelState.OPEN, ChannelEvent.REVOKE): ChannelState.REVOKED,
    (ChannelState.OPEN, ChannelEvent.STOP): ChannelState.RECLAIMED,
    **{
        (state, event): ChannelState.RECLAIMED
        for state in (ChannelState.OPEN, ChannelState.REVOKED)
        for event in _RECLAIMING_EVENTS
    },
    **{
        (state, ChannelEvent.CLIENT_GONE): ChannelState.ABANDONED
        for state in (ChannelState.OPEN, ChannelState.REVOKED, ChannelState.RECLAIMED)
    },
    (ChannelState.REVOKED, ChannelEvent.EMPTIED): ChannelState.RECLAIMED,
    (ChannelState.REVOKED, ChannelEvent.RELEASED): ChannelState.DRAINED,
    (ChannelState.RECLAIMED, ChannelEvent.RELEASED): ChannelState.DRAINED,
    (ChannelState.ABANDONED, ChannelEvent.RELEASED): ChannelState.CLOSED,
    (ChannelState.DRAINED, ChannelEvent.EMPTIED): ChannelState.CLOSED,
    (ChannelState.DRAINED, ChannelEvent.CLIENT_GONE): ChannelState.CLOSED,
}

ChannelMachine = Machine[ChannelState, ChannelEvent]
