"""Contents of requests that crashed or hung slots, and how contents are told apart.

A request is known by its content, so that a client that sends it again cannot take the service down: the same tensors
have the same content, whatever their order. A digest of megabytes takes milliseconds, in which the daemon serves
nobody. So contents are told apart by their sizes and a few of their bytes first, and where that does not do, the digest
is computed in slices. Nothing is computed of a content whose size is not that of a known one.

A client can change a content in its shared memory after a worker has read it. So such a content holds only for the user
or tenant whose memory it was: nobody can have the content of another one refused, nor have it cleared of suspicion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import TensorLocation, iterate_tensors
from weightd_protocol.errors import Internal

# Up to so many bytes are read at once, which takes 5 microseconds.
SMALL_BYTES = 4096

# How much of a large content its mark depends on.
_SAMPLE_CHUNK_BYTES = 256
_SAMPLE_CHUNKS = 16

# A slice takes a third of a millisecond.
SLICE_BYTES = 256 * 1024


def compute_sample_digest(request: Request) -> bytes:
    """Return what equal contents have in common, in a few microseconds: the digest of a small one, else of a part.

    It is computed once: memory of a client may be another content later.
    """
    if not request.sample_digest:
        request.sample_digest = compute_digest(request) if is_small(request) else _sample_digest(request)
    return request.sample_digest


def _sample_digest(request: Request) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for header, frame in _iterate_headers(request):
        state.update(header)
        last = len(frame) - _SAMPLE_CHUNK_BYTES
        for index in range(_SAMPLE_CHUNKS if last > 0 else 1):
            begin = max(0, last * index // (_SAMPLE_CHUNKS - 1))
            state.update(frame[begin : begin + _SAMPLE_CHUNK_BYTES])
    return state.digest()


def is_small(request: Request) -> bool:
    """Return whether the digest is a matter of microseconds."""
    return request.content_bytes <= SMALL_BYTES


def compute_digest(request: Request) -> bytes:
    """Return the digest, computed now unless it is known."""
    task = FingerprintTask(request)
    while not task.step():
        pass
    return request.digest


class FingerprintTask:
    """Computes the digest of a request, and leaves it there."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._hash = hashlib.blake2b(digest_size=16)
        self._chunks = _iterate_chunks(request)
        if not is_small(request):
            compute_sample_digest(request)

    def step(self) -> bool:
        """Read a slice; return whether the digest is known."""
        remaining_bytes = 0 if self.request.digest else SLICE_BYTES
        while remaining_bytes > 0:
            chunk = next(self._chunks, None)
            if chunk is None:
                self.request.digest = self._hash.digest()
                break
            self._hash.update(chunk)
            remaining_bytes -= len(chunk)
        return bool(self.request.digest)


def _iterate_chunks(request: Request) -> Iterator[Any]:
    for header, frame in _iterate_headers(request):
        yield header
        for begin in range(0, len(frame), SLICE_BYTES):
            yield frame[begin : begin + SLICE_BYTES]


def _iterate_headers(request: Request) -> Iterator[tuple[bytes, memoryview | TensorLocation]]:
    each = iterate_tensors(request.description.inputs, request.frames, request.locations)
    for spec, content in sorted(each, key=lambda pair: pair[0].name):
        yield f"{spec.name}\0{spec.datatype}\0{spec.shape}\0".encode(), content


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
