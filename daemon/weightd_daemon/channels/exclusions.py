"""Tenants and users whose requests to a model must pass through the daemon for some time. No I/O, no clock."""

from __future__ import annotations

from weightd_protocol.errors import FailedPrecondition

# Maximum number of requests to a model that workers may hand over for a tenant or user within `EXCLUSION_S`. The daemon
# processes such requests at once, so more of them would pass its limits for each connection.
MAX_HANDED_OVER = 64

# Seconds for which a tenant or user has no channel to a model.
EXCLUSION_S = 60.0

# Maximum number of pairs of a tenant or user and a model that are remembered. The oldest pair is dropped first.
_MAX_PAIRS = 1024


class ChannelExclusions:
    """Decides who may have direct channels to which model.

    A principal is a tenant or user (`ClientOrigin.principal`).
    """

    def __init__(self) -> None:
        # By principal and model: until when the principal is excluded, and why.
        self._excluded: dict[tuple[str, str], tuple[float, str]] = {}
        # By principal and model: the number of handed over requests, and since when they are counted.
        self._handed_over: dict[tuple[str, str], tuple[int, float]] = {}

    def check(self, principal: str, model: str, now: float) -> None:
        """Check that a principal may have channels to a model.

        Raises:
            FailedPrecondition: it may not; the text says why.
        """
        until, reason = self._excluded.get((principal, model), (0.0, ""))
        if now < until:
            raise FailedPrecondition(f"no direct channel to {model} for {until - now:.0f} s: {reason}")

    def exclude(self, principal: str, model: str, reason: str, now: float) -> None:
        """Exclude a principal from now on."""
        self._excluded.pop((principal, model), None)
        self._excluded[principal, model] = now + EXCLUSION_S, reason
        if len(self._excluded) > _MAX_PAIRS:
            del self._excluded[next(iter(self._excluded))]

    def count_handover(self, principal: str, model: str, now: float) -> bool:
        """Count a request that a worker has handed over. Return whether there are too many."""
        count, since = self._handed_over.pop((principal, model), (0, now))
        if now >= since + EXCLUSION_S:
            count, since = 0, now
        self._handed_over[principal, model] = count + 1, since
        if len(self._handed_over) > _MAX_PAIRS:
            del self._handed_over[next(iter(self._handed_over))]
        return count >= MAX_HANDED_OVER
