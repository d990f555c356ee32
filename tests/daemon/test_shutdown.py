from __future__ import annotations

import itertools

import pytest

from weightd.daemon.generations.states import IllegalTransition
from weightd.daemon.shutdown import Event, Shutdown, State

# Which events lead to a state, and what it then is: begun, finishing, ending.
LISTED: dict[tuple[Event, ...], tuple[bool, bool, bool]] = {
    (): (False, False, False),
    (Event.STOP,): (True, True, False),
    (Event.STOP, Event.DRAINED): (True, False, True),
    (Event.STOP, Event.FORCE): (True, False, True),
    (Event.STOP, Event.DRAINED, Event.FORCE): (True, False, True),
    (Event.STOP, Event.FORCE, Event.FORCE): (True, False, True),
}


@pytest.mark.parametrize("events", [*itertools.chain(*(itertools.product(Event, repeat=n) for n in range(4)))])
def test_what_is_listed_is_legal_and_nothing_else(events: tuple[Event, ...]) -> None:
    shutdown = Shutdown()
    for index, event in enumerate(events, 1):
        if events[:index] not in LISTED:
            with pytest.raises(IllegalTransition):
                shutdown.handle(event)
            return
        shutdown.handle(event)
    assert (shutdown.has_begun, shutdown.is_draining, shutdown.is_stopping) == LISTED[events]
    assert len(State) == 3
