"""State machine of the daemon's shutdown, with the states serving, draining and stopping.

`SHUTDOWN` lists every legal transition. Any other pair of state and event raises IllegalTransition.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from weightd_daemon.generations.states import advance
from weightd_daemon.platform.event_loop import Timer


class ShutdownState(enum.Enum):
    """Phase of the shutdown."""

    SERVING = "serving"  # no shutdown was requested
    DRAINING = "draining"  # new requests are rejected; accepted requests are finished
    STOPPING = "stopping"  # not waiting for requests; models are stopped, or left to the next daemon


class ShutdownEvent(enum.Enum):
    """Event that moves `Shutdown` to another state."""

    STOP = "stop"  # a shutdown was requested
    DRAINED = "drained"  # every accepted request is finished, or the drain timeout has passed
    FORCE = "force"  # a shutdown was requested again: do not wait for requests


SHUTDOWN: Mapping[tuple[ShutdownState, ShutdownEvent], ShutdownState] = {
    (ShutdownState.SERVING, ShutdownEvent.STOP): ShutdownState.DRAINING,
    (ShutdownState.DRAINING, ShutdownEvent.DRAINED): ShutdownState.STOPPING,
    (ShutdownState.DRAINING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
    (ShutdownState.STOPPING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
}


class Shutdown:
    """The current state of a daemon's shutdown. It changes only by the transitions in `SHUTDOWN`.

    Args:
        on_timeout: called with the current time when the drain timeout has passed.

    Attributes:
        has_begun: whether a shutdown was requested, so that new requests are rejected.
        timer: calls `on_timeout`. `Daemon.stop` sets it to the end of the drain timeout.
    """

    def __init__(self, on_timeout: Callable[[float], object] = lambda _: None) -> None:
        self._state = ShutdownState.SERVING
        self.has_begun = False
        self.timer = Timer(on_timeout)

    def handle(self, event: ShutdownEvent) -> None:
        """Change the state by the transition that `SHUTDOWN` lists for an event.

        Raises:
            IllegalTransition: `SHUTDOWN` lists no transition for the event in the current state.
        """
        self._state = advance(SHUTDOWN, self._state, event)
        # `has_begun` is an attribute, not a property, because it is read for every request.
        self.has_begun = self._state is not ShutdownState.SERVING

    @property
    def is_draining(self) -> bool:
        """Whether the daemon is waiting for accepted requests to finish."""
        return self._state is ShutdownState.DRAINING

    @property
    def is_stopping(self) -> bool:
        """Whether the shutdown no longer waits for accepted requests."""
        return self._state is ShutdownState.STOPPING
