"""How the daemon ends: what it still takes, and what it still waits for.

All legality is in the table of this file, and an unlisted pair of state and event raises.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from weightd_daemon.generations.states import advance
from weightd_daemon.platform.event_loop import Timer


class ShutdownState(enum.Enum):
    """How far the end is."""

    SERVING = "serving"  # nobody wants it
    DRAINING = "draining"  # no new request is taken; what was accepted is finished
    STOPPING = "stopping"  # no request is waited for; the models wind down, or are left to the next daemon


class ShutdownEvent(enum.Enum):
    """What happens to a daemon that is to end."""

    STOP = "stop"  # it is told to
    DRAINED = "drained"  # what was accepted is finished, or the time for that is over
    FORCE = "force"  # it is told again


SHUTDOWN: Mapping[tuple[ShutdownState, ShutdownEvent], ShutdownState] = {
    (ShutdownState.SERVING, ShutdownEvent.STOP): ShutdownState.DRAINING,
    (ShutdownState.DRAINING, ShutdownEvent.DRAINED): ShutdownState.STOPPING,
    (ShutdownState.DRAINING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
    (ShutdownState.STOPPING, ShutdownEvent.FORCE): ShutdownState.STOPPING,
}


class Shutdown:
    """Where one daemon is in `SHUTDOWN`.

    Args:
        on_timeout: called with the time when what was accepted has taken too long.

    Attributes:
        has_begun: whether no new request is taken.
        timer: call it when it is due.
    """

    def __init__(self, on_timeout: Callable[[float], object] = lambda _: None) -> None:
        self._state = ShutdownState.SERVING
        self.has_begun = False
        self.timer = Timer(on_timeout)

    def handle(self, event: ShutdownEvent) -> None:
        """Go on to the next state.

        Raises:
            IllegalTransition: the table does not list the event in this state.
        """
        self._state = advance(SHUTDOWN, self._state, event)
        # For this every request asks.
        self.has_begun = self._state is not ShutdownState.SERVING

    @property
    def is_draining(self) -> bool:
        """Whether what was accepted is waited for."""
        return self._state is ShutdownState.DRAINING

    @property
    def is_stopping(self) -> bool:
        """Whether no request is waited for any more."""
        return self._state is ShutdownState.STOPPING
