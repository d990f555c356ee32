"""Requests that workers died of, or hang in, are kept from the next worker, whoever sends them again.

A request is known by the digest of its content, so a client that tries again cannot take the service down. A digest
is only computed where a request's size is that of one that is known: nobody pays for it while nothing is.
"""

from __future__ import annotations

from weightd.daemon.request import Request, content
from weightd.protocol.errors import Internal

# Long enough to stop a loop of retries; short enough that a request which only had bad luck is not lost for the day.
QUARANTINE_S = 300.0

# A worker that hangs may have been stopped from outside; a second one, with the same content and none that has
# answered it in between, has not.
MAX_HANGS = 2

# Contents that are remembered; the oldest gives way. Each costs a hundred bytes.
_MAX_KNOWN = 1024


class Quarantine:
    """Contents that are refused, and contents that are under suspicion. Times are monotonic seconds."""

    def __init__(self) -> None:
        # Of each content: until when, and how often a worker hung in it; the size of its tensors.
        self._held: dict[bytes, tuple[float, int]] = {}
        self._suspects: dict[bytes, tuple[int, int]] = {}
        self._sizes: frozenset[int] = frozenset()

    def check(self, request: Request, now: float) -> None:
        """Raise if the request is in quarantine.

        Raises:
            Internal: the text says for how long.
        """
        if request.nbytes not in self._sizes:
            return
        self._forget_expired(now)
        held = self._held.get(content(request))
        if held is not None:
            left = held[0] - now
            raise Internal(f"workers died of this content or hung in it: it is refused for {left:.0f} s more")

    def hold(self, request: Request, now: float) -> None:
        """Refuse the request's content from now on."""
        digest = content(request)
        self._suspects.pop(digest, None)
        self._held.pop(digest, None)  # the oldest comes first
        self._held[digest] = now + QUARANTINE_S, request.nbytes
        if len(self._held) > _MAX_KNOWN:
            del self._held[next(iter(self._held))]
        self._measure()

    def hung(self, request: Request, now: float) -> bool:
        """A worker hung in the request; return whether its content is refused from now on."""
        digest = content(request)
        hangs, _ = self._suspects.pop(digest, (0, 0))
        if hangs + 1 >= MAX_HANGS:
            self.hold(request, now)
            return True
        self._suspects[digest] = hangs + 1, request.nbytes
        if len(self._suspects) > _MAX_KNOWN:
            del self._suspects[next(iter(self._suspects))]
        self._measure()
        return False

    def answered(self, request: Request) -> None:
        """A worker has answered the request: its content is beyond suspicion."""
        if self._suspects and request.nbytes in self._sizes:
            self._suspects.pop(content(request), (0, 0))
            self._measure()

    def clear(self) -> None:
        """Forget everything: another model is served."""
        self._held.clear()
        self._suspects.clear()
        self._measure()

    def count(self, now: float) -> int:
        """Return how many contents are refused."""
        self._forget_expired(now)
        return len(self._held)

    def _forget_expired(self, now: float) -> None:
        # All are held for the same time: the oldest is the first to go.
        while self._held and (oldest := next(iter(self._held.items())))[1][0] <= now:
            del self._held[oldest[0]]
            self._measure()

    def _measure(self) -> None:
        self._sizes = frozenset(size for _, size in (*self._held.values(), *self._suspects.values()))
