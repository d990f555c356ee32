"""What tells the contents of requests apart: the same tensors have the same content, whatever their order.

A digest of megabytes takes milliseconds, in which the daemon serves nobody. So contents are told apart by a few of
their bytes first, and where that does not do, the digest is computed in slices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import TensorLocation, iterate_tensors

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
