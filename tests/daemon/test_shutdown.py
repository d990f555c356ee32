from __future__ import annotations

import itertools

import pytest

from weightd_daemon.generations.states import IllegalTransition
from weightd_daemon.shutdown import Shutdown, ShutdownEvent, ShutdownState

# The state after each legal sequence of events: has_begun, is_draining, is_stopping.
LISTED: dict[tuple[ShutdownEvent, ...], tuple[bool, bool, bool]] = {
    (): (False, False, False),
    (ShutdownEvent.STOP,): (True, True, False),
    (ShutdownEvent.STOP, ShutdownEvent.DRAINED): (True, False, True),
    (ShutdownEvent.STOP, ShutdownEvent.FORCE): (True, False, True),
    (ShutdownEvent.STOP, ShutdownEvent.DRAINED, ShutdownEvent.FORCE): (True, False, True),
    (ShutdownEvent.STOP, ShutdownEvent.FORCE, ShutdownEvent.FORCE): (True, False, True),
}


@pytest.mark.parametrize("events", [*itertools.chain(*(itertools.product(ShutdownEvent, repeat=n) for n in range(4)))])
def test_only_listed_events_are_legal(events: tuple[ShutdownEvent, ...]) -> None:
    shutdown = Shutdown()
    for index, event in enumerate(events, 1):
        if events[:index] not in LISTED:
            with pytest.raises(IllegalTransition):
                shutdown.handle(event)
            return
        shutdown.handle(event)
    assert (shutdown.has_begun, shutdown.is_draining, shutdown.is_stopping) == LISTED[events]
    assert len(ShutdownState) == 3
