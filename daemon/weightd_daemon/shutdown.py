"""State machine of the daemon's stop: serving, draining, stopping.

`SHUTDOWN` lists every legal transition; any other pair of state and event raises.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from weightd_daemon.generations.states import advance
from weightd_daemon.platform.event_loop import Timer


class ShutdownState(enum.Enum):
    """Phase of the stop."""

    SERVING = "serving"  # no stop was requested
    DRAINING = "draining"  # new requests are rejected; accepted requests are finished
    STOPPING = "stopping"  # requests are not waited for; models are stopped, or left to the next daemon


class ShutdownEvent(enum.Enum):
    """Event that moves the stop to another phase."""

    STOP = "stop"  # a stop was requested
    DRAINED = "drained"  # every accepted request is finished, or the drain timeout has passed
    FORCE = "force"  # a stop was requested again


SHUTDOWN: Mapping[tuple[ShutdownState, ShutdownEvent], ShutdownState] = {
    (ShutdownState.SERVING, ShutdownEvent.STOP): ShutdownState.DRAINING,
    (ShutdownState.DRAINING, ShutdownEvent.DRAINED): ShutdownState.STOPPING,
    (ShutdownState.DRAINING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
    (ShutdownState.STOPPING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
}


class Shutdown:
    """Progress of one daemon through `SHUTDOWN`.

    Args:
        on_timeout: called with the time when the drain timeout has passed.

    Attributes:
        has_begun: whether new requests are rejected.
        timer: calls `on_timeout` when it is due; `Daemon.stop` sets it.
    """

    def __init__(self, on_timeout: Callable[[float], object] = lambda _: None) -> None:
        self._state = ShutdownState.SERVING
        self.has_begun = False
        self.timer = Timer(on_timeout)

    def handle(self, event: ShutdownEvent) -> None:
        """Move to the next phase.

        Raises:
            IllegalTransition: `SHUTDOWN` does not list the event in this phase.
        """
        self._state = advance(SHUTDOWN, self._state, event)
        # Every request reads this attribute, so it is not a property.
        self.has_begun = self._state is not ShutdownState.SERVING

    @property
    def is_draining(self) -> bool:
        """Whether the daemon is waiting for accepted requests to finish."""
        return self._state is ShutdownState.DRAINING

    @property
    def is_stopping(self) -> bool:
        """Whether the daemon no longer waits for requests."""
        return self._state is ShutdownState.STOPPING
