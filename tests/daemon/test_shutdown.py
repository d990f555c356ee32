from __future__ import annotations

import itertools

import pytest

from weightd.daemon.generations.states import IllegalTransition
from weightd.daemon.shutdown import Event, Shutdown, State

# Which events lead to a state, and what it then is: begun, finishing, ending.
LISTED: dict[tuple[Event, ...], tuple[bool, bool, bool]] = {
    (): (False, False, False),
    (Event.STOP,): (True, True, False),
    (Event.STOP, Event.DONE): (True, False, True),
    (Event.STOP, Event.INSIST): (True, False, True),
    (Event.STOP, Event.DONE, Event.INSIST): (True, False, True),
    (Event.STOP, Event.INSIST, Event.INSIST): (True, False, True),
}


@pytest.mark.parametrize("events", [*itertools.chain(*(itertools.product(Event, repeat=n) for n in range(4)))])
def test_what_is_listed_is_legal_and_nothing_else(events: tuple[Event, ...]) -> None:
    shutdown = Shutdown()
    for index, event in enumerate(events, 1):
        if events[:index] not in LISTED:
            with pytest.raises(IllegalTransition):
                shutdown.on(event)
            return
        shutdown.on(event)
    assert (shutdown.begun, shutdown.finishing, shutdown.ending) == LISTED[events]
    assert len(State) == 3
