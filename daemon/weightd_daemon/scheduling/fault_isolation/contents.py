"""The quarantine of request contents, and the digests by which contents are compared.

The content of a request is its input tensors, in any order. The quarantine identifies a request by its content, so that
a client cannot take the service down by sending the same tensors again in a new request.

The digest of a content of megabytes takes milliseconds, in which the daemon serves no other client. So contents are
first compared by size and by a digest of a few samples. Only if both match is the digest of the whole content computed,
in slices. If no known content has the same size, no digest is computed.

A client can change a content in its shared memory after a worker has read it. So an entry for such a content applies
only to the principal that owns the memory. Otherwise a client could have another client's content quarantined, or
cleared of suspicion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import TensorLocation, iterate_tensors
from weightd_protocol.errors import Internal

# Maximum bytes of a content whose digest is computed at once, which takes 5 microseconds.
SMALL_BYTES = 4096

# Bytes of a sample, and number of samples of each tensor, in the sample digest of a large content.
_SAMPLE_CHUNK_BYTES = 256
_SAMPLE_CHUNKS = 16

# Number of bytes that are hashed in one turn of the event loop, which takes a third of a millisecond.
SLICE_BYTES = 256 * 1024


def compute_sample_digest(request: Request) -> bytes:
    """Return the digest of a few samples of a request's content; for a small content, the digest of all of it.

    The computation takes a few microseconds. The digest is stored in the request, because the client may change the
    content in its shared memory later.
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
    """Return whether the content is so small that its digest takes only microseconds."""
    return request.content_bytes <= SMALL_BYTES


def compute_digest(request: Request) -> bytes:
    """Return the digest of a request's content; compute the digest if it is not known yet."""
    task = FingerprintTask(request)
    while not task.step():
        pass
    return request.digest


class FingerprintTask:
    """Computes the digest of a request's content in steps, and stores the digest in the request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._hash = hashlib.blake2b(digest_size=16)
        self._chunks = _iterate_chunks(request)
        if not is_small(request):
            compute_sample_digest(request)

    def step(self) -> bool:
        """Hash one slice of the content; return whether the digest is complete."""
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


# Seconds for which a content stays in quarantine or under suspicion: long enough to stop a loop of retries, and short
# enough that a request that was quarantined by mistake works again within minutes.
QUARANTINE_S = 300.0

# Number of hangs after which a content is quarantined. The cause of a single hang may be a process that was paused from
# outside (SIGSTOP). The cause of a second hang with the same content, without an answer in between, is very likely the
# content.
MAX_HANGS = 2

# Maximum number of entries in a content table, of about a hundred bytes each. A full table drops its oldest entry.
_MAX_CONTENTS = 1024


@dataclass(frozen=True)
class _ContentRecord:
    """An entry of a content table: its expiry time, and the content's number of hangs, size and sample digest."""

    expires_at: float
    hangs: int
    nbytes: int
    sample_digest: bytes


class _ContentKey(NamedTuple):
    """The key of a content: its digest, and the principal to which the entry applies; "" for all principals."""

    digest: bytes
    principal: str


class _ContentTable(dict[_ContentKey, _ContentRecord]):
    """Contents by key, the oldest entry first. Each entry expires `QUARANTINE_S` seconds after its addition."""

    __slots__ = ("_sample_digests",)

    def __init__(self) -> None:
        super().__init__()
        self._sample_digests: Mapping[int, frozenset[bytes]] = {}

    def may_contain(self, request: Request, now: float) -> bool:
        """Return whether the request's content may be in the table, judging by its sample digest.

        For a small content, the answer is certain.
        """
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
    """The quarantined and the suspected contents of one model. Times are monotonic seconds.

    Methods that need the digest of a request compute it, unless it is known already.

    Attributes:
        quarantined: the contents whose requests are refused.
        suspected: the contents of requests during which a slot hung or a rank group was lost.
    """

    def __init__(self) -> None:
        self.quarantined = _ContentTable()
        self.suspected = _ContentTable()

    def may_be_quarantined(self, request: Request, now: float) -> bool:
        """Return whether the content may be in quarantine. If not, `check_request` has no effect."""
        return self.quarantined.may_contain(request, now)

    def may_be_suspected(self, request: Request, now: float) -> bool:
        """Return whether the content may be suspected. If not, `on_answered` has no effect."""
        return self.suspected.may_contain(request, now)

    def check_request(self, request: Request, now: float) -> None:
        """Raise an error if the request's content is in quarantine.

        Raises:
            Internal: the content is in quarantine; the text contains the remaining seconds.
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
        """Quarantine the content of the request."""
        self.suspected.remove(_content_key(request))
        self.quarantined.add(request, now)

    def on_hang(self, request: Request, now: float) -> bool:
        """Record that a slot hung during the request; return whether the request's content is quarantined now."""
        self.suspected.drop_expired(now)
        suspect = self.suspected.remove(_content_key(request))
        hangs = 1 + (suspect.hangs if suspect is not None else 0)
        if hangs >= MAX_HANGS:
            self.add(request, now)
            return True
        self.suspected.add(request, now, hangs)
        return False

    def on_answered(self, request: Request, now: float) -> None:
        """Clear the content of an answered request from suspicion."""
        if self.may_be_suspected(request, now):
            self.suspected.remove(_content_key(request))

    def clear(self) -> None:
        """Forget all contents, because another model version is served."""
        self.quarantined.clear()
        self.suspected.clear()

    def count(self, now: float) -> int:
        """Return the number of quarantined contents."""
        self.quarantined.drop_expired(now)
        return len(self.quarantined)
