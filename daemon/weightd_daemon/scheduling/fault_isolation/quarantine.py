"""Requests that slots died of, or hang in, are kept from the next slot, whoever sends them again.

A request is known by its content, so a client that tries again cannot take the service down. Nothing is computed of a
content whose size is not that of one that is known, so nobody pays for it while nothing is.

A client can change a content in its shared memory after a worker has read it. So such a content holds only for the user
or tenant whose memory it was: nobody can have the content of another one refused, nor have it cleared of suspicion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weightd_daemon.scheduling.fault_isolation.fingerprint import compute_digest, compute_sample_digest
from weightd_daemon.scheduling.request import Request
from weightd_protocol.errors import Internal

# Long enough to stop a loop of retries; short enough that a request which only had bad luck is not lost for the day.
QUARANTINE_S = 300.0

# A slot that hangs may have been stopped from outside; a second one, with the same content and none that has
# answered it in between, has not.
MAX_HANGS = 2

# Contents that are remembered; the oldest gives way. Each costs a hundred bytes.
_MAX_CONTENTS = 1024


@dataclass(frozen=True)
class _ContentRecord:
    """Of a known content: until when it is known, how often a slot hung in it, and what tells it from most others."""

    expires_at: float
    hangs: int
    nbytes: int
    sample_digest: bytes


class _ContentKey(NamedTuple):
    """What a content is known by: its digest, and for whom it holds; "" for everybody."""

    digest: bytes
    principal: str


class _ContentTable(dict[_ContentKey, _ContentRecord]):
    """Contents by their keys, the oldest first; each is known for the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._sample_digests: Mapping[int, frozenset[bytes]] = {}

    def may_contain(self, request: Request, now: float) -> bool:
        """Whether the content may be among them; for sure if it is small."""
        if not self:
            return False
        self.drop_expired(now)
        sample_digests = self._sample_digests.get(request.content_bytes)
        return sample_digests is not None and compute_sample_digest(request) in sample_digests

    def add(self, request: Request, now: float, hangs: int = 0) -> None:
        key = _content_key(request)
        self.remove(key)
        self[key] = _ContentRecord(now + QUARANTINE_S, hangs, request.content_bytes, compute_sample_digest(request))
        if len(self) > _MAX_CONTENTS:
            del self[next(iter(self))]
        self._rebuild_index()

    def remove(self, key: _ContentKey) -> _ContentRecord | None:
        found = self.pop(key, None)
        if found is not None:
            self._rebuild_index()
        return found

    def clear(self) -> None:
        super().clear()
        self._rebuild_index()

    def drop_expired(self, now: float) -> None:
        has_expired = False
        while self and (oldest := next(iter(self.items())))[1].expires_at <= now:
            del self[oldest[0]]
            has_expired = True
        if has_expired:
            self._rebuild_index()

    def _rebuild_index(self) -> None:
        sample_digests: dict[int, set[bytes]] = {}
        for each in self.values():
            sample_digests.setdefault(each.nbytes, set()).add(each.sample_digest)
        self._sample_digests = {nbytes: frozenset(those) for nbytes, those in sample_digests.items()}


def _content_key(request: Request) -> _ContentKey:
    return _ContentKey(compute_digest(request), request.origin.principal if request.is_mutable else "")


class Quarantine:
    """Contents that are refused, and contents that are under suspicion. Times are monotonic seconds.

    What is said of the digest: it is computed where it is asked for, unless that has been done before.

    Attributes:
        quarantined: those that are refused.
        suspected: those that are under suspicion.
    """

    def __init__(self) -> None:
        self.quarantined = _ContentTable()
        self.suspected = _ContentTable()

    def may_be_quarantined(self, request: Request, now: float) -> bool:
        """Return whether the request may be in quarantine: then it is worth its digest to `check_request` it."""
        return self.quarantined.may_contain(request, now)

    def may_be_suspected(self, request: Request, now: float) -> bool:
        """Return whether the request's content may be under suspicion: then `on_answered` is worth its digest."""
        return self.suspected.may_contain(request, now)

    def check_request(self, request: Request, now: float) -> None:
        """Raise if the request is in quarantine.

        Raises:
            Internal: the text says for how long.
        """
        if not self.may_be_quarantined(request, now):
            return
        digest = compute_digest(request)
        record = self.quarantined.get(_ContentKey(digest, "")) or self.quarantined.get(
            _ContentKey(digest, request.origin.principal)
        )
        if record is not None:
            left = record.expires_at - now
            raise Internal(f"this content crashed or hung workers: it is quarantined for {left:.0f} s more")

    def add(self, request: Request, now: float) -> None:
        """Refuse the request's content from now on."""
        self.suspected.remove(_content_key(request))
        self.quarantined.add(request, now)

    def on_hang(self, request: Request, now: float) -> bool:
        """A slot hung in the request; return whether its content is refused from now on."""
        self.suspected.drop_expired(now)
        suspect = self.suspected.remove(_content_key(request))
        hangs = 1 + (suspect.hangs if suspect is not None else 0)
        if hangs >= MAX_HANGS:
            self.add(request, now)
            return True
        self.suspected.add(request, now, hangs)
        return False

    def on_answered(self, request: Request, now: float) -> None:
        """A slot has answered the request: its content is beyond suspicion."""
        if self.may_be_suspected(request, now):
            self.suspected.remove(_content_key(request))

    def clear(self) -> None:
        """Forget everything: another model is served."""
        self.quarantined.clear()
        self.suspected.clear()

    def count(self, now: float) -> int:
        """Return how many contents are refused."""
        self.quarantined.drop_expired(now)
        return len(self.quarantined)
