"""Requests that seats died of, or hang in, are kept from the next seat, whoever sends them again.

A request is known by its content, so a client that tries again cannot take the service down. Nothing is computed of a
content whose size is not that of one that is known, so nobody pays for it while nothing is.

A client can change a content in its shared memory after a worker has read it. So such a content holds only for the user
or tenant whose memory it was: nobody can have the content of another one refused, nor have it cleared of suspicion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weightd.daemon.requests.blame.contents import content, mark
from weightd.daemon.requests.request import Request
from weightd.protocol.errors import Internal

# Long enough to stop a loop of retries; short enough that a request which only had bad luck is not lost for the day.
QUARANTINE_S = 300.0

# A seat that hangs may have been stopped from outside; a second one, with the same content and none that has
# answered it in between, has not.
MAX_HANGS = 2

# Contents that are remembered; the oldest gives way. Each costs a hundred bytes.
_MAX_KNOWN = 1024


@dataclass(frozen=True)
class _Content:
    """Of a known content: until when it is known, how often a seat hung in it, and what tells it from most others."""

    until: float
    hangs: int
    nbytes: int
    mark: bytes


class _Key(NamedTuple):
    """What a content is known by: its digest, and for whom it holds; "" for everybody."""

    digest: bytes
    owner: str


class _Contents(dict[_Key, _Content]):
    """Contents by their keys, the oldest first; each is known for the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: Mapping[int, frozenset[bytes]] = {}

    def may_have(self, request: Request, now: float) -> bool:
        """Whether the content may be among them; for sure if it is small."""
        if not self:
            return False
        self.forget_expired(now)
        marks = self._marks.get(request.content_bytes)
        return marks is not None and mark(request) in marks

    def put(self, request: Request, now: float, hangs: int = 0) -> None:
        key = _key(request)
        self.remove(key)
        self[key] = _Content(now + QUARANTINE_S, hangs, request.content_bytes, mark(request))
        if len(self) > _MAX_KNOWN:
            del self[next(iter(self))]
        self._index()

    def remove(self, key: _Key) -> _Content | None:
        found = self.pop(key, None)
        if found is not None:
            self._index()
        return found

    def clear(self) -> None:
        super().clear()
        self._index()

    def forget_expired(self, now: float) -> None:
        expired = False
        while self and (oldest := next(iter(self.items())))[1].until <= now:
            del self[oldest[0]]
            expired = True
        if expired:
            self._index()

    def _index(self) -> None:
        marks: dict[int, set[bytes]] = {}
        for each in self.values():
            marks.setdefault(each.nbytes, set()).add(each.mark)
        self._marks = {nbytes: frozenset(those) for nbytes, those in marks.items()}


def _key(request: Request) -> _Key:
    return _Key(content(request), request.origin.far if request.is_mutable else "")


class Quarantine:
    """Contents that are refused, and contents that are under suspicion. Times are monotonic seconds.

    What is said of the digest: it is computed where it is asked for, unless that has been done before.

    Attributes:
        held: those that are refused.
        suspects: those that are under suspicion.
    """

    def __init__(self) -> None:
        self.held = _Contents()
        self.suspects = _Contents()

    def may_hold(self, request: Request, now: float) -> bool:
        """Return whether the request may be in quarantine: then it is worth its digest to `check` it."""
        return self.held.may_have(request, now)

    def may_suspect(self, request: Request, now: float) -> bool:
        """Return whether the request's content may be under suspicion: then `answered` is worth its digest."""
        return self.suspects.may_have(request, now)

    def check(self, request: Request, now: float) -> None:
        """Raise if the request is in quarantine.

        Raises:
            Internal: the text says for how long.
        """
        if not self.may_hold(request, now):
            return
        digest = content(request)
        held = self.held.get(_Key(digest, "")) or self.held.get(_Key(digest, request.origin.far))
        if held is not None:
            left = held.until - now
            raise Internal(f"workers died of this content or hung in it: it is refused for {left:.0f} s more")

    def hold(self, request: Request, now: float) -> None:
        """Refuse the request's content from now on."""
        self.suspects.remove(_key(request))
        self.held.put(request, now)

    def hung(self, request: Request, now: float) -> bool:
        """A seat hung in the request; return whether its content is refused from now on."""
        self.suspects.forget_expired(now)
        suspect = self.suspects.remove(_key(request))
        hangs = 1 + (suspect.hangs if suspect is not None else 0)
        if hangs >= MAX_HANGS:
            self.hold(request, now)
            return True
        self.suspects.put(request, now, hangs)
        return False

    def answered(self, request: Request, now: float) -> None:
        """A seat has answered the request: its content is beyond suspicion."""
        if self.may_suspect(request, now):
            self.suspects.remove(_key(request))

    def clear(self) -> None:
        """Forget everything: another model is served."""
        self.held.clear()
        self.suspects.clear()

    def count(self, now: float) -> int:
        """Return how many contents are refused."""
        self.held.forget_expired(now)
        return len(self.held)
