from __future__ import annotations

import itertools
import os

import pytest

from weightd_common import memfd
from weightd_daemon.scheduling.fault_isolation.contents import (
    SLICE_BYTES,
    SMALL_BYTES,
    FingerprintTask,
    compute_digest,
    compute_sample_digest,
    is_small,
)
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.messages.inference import RequestDescription, TensorSpec

_numbers = itertools.count(1)
SIZES = [0, 1, 255, 256, 257, SMALL_BYTES, SMALL_BYTES + 1, SLICE_BYTES, 3 * SLICE_BYTES + 5]


def request(*frames: bytes, names: str = "ab") -> Request:
    specs = tuple(TensorSpec(name, "UINT8", (len(frame),)) for name, frame in zip(names, frames, strict=False))
    number = next(_numbers)
    return Request(number, b"c", f"id{number}", RequestDescription("m", specs), frames, 0.0, 1e9, sum(map(len, frames)))


@pytest.mark.parametrize("size", SIZES)
def test_equal_requests_have_equal_marks_and_contents_whatever_their_order(size: int) -> None:
    one, other = request(bytes(size), b"456"), request(b"456", bytes(size), names="ba")
    assert (compute_sample_digest(one), compute_digest(one)) == (compute_sample_digest(other), compute_digest(other))


@pytest.mark.parametrize(
    "others",
    [
        [TensorSpec("c", "UINT8", (3,)), TensorSpec("b", "UINT8", (3,))],
        [TensorSpec("a", "INT8", (3,)), TensorSpec("b", "UINT8", (3,))],
        [TensorSpec("a", "UINT8", (3, 1)), TensorSpec("b", "UINT8", (3,))],
        [TensorSpec("b", "UINT8", (3,)), TensorSpec("a", "UINT8", (3,))],
    ],
    ids=["name", "datatype", "shape", "exchanged"],
)
def test_the_same_bytes_of_other_tensors_are_another_content(others: list[TensorSpec]) -> None:
    one, other = request(b"123", b"456"), request(b"123", b"456")
    other.description = RequestDescription("m", tuple(others))
    assert compute_digest(one) != compute_digest(other)


@pytest.mark.parametrize("size", SIZES[1:])
def test_one_byte_makes_another_content_and_of_a_small_one_another_mark(size: int) -> None:
    one, other = request(bytes(size)), request(bytes(size - 1) + b"1")
    assert compute_digest(one) != compute_digest(other)
    assert compute_sample_digest(one) != compute_sample_digest(other)  # the last byte is looked at
    middle = request(bytes(size // 3) + b"1" + bytes(size - size // 3 - 1))
    assert compute_digest(one) != compute_digest(middle)
    assert compute_sample_digest(one) != compute_sample_digest(middle) or not is_small(one)


def test_a_mark_looks_at_little_of_much() -> None:
    one = bytearray(SLICE_BYTES)
    marks = {compute_sample_digest(request(bytes(one)))}
    for index in range(0, SLICE_BYTES, 64):
        changed = bytearray(one)
        changed[index] = 1
        marks.add(compute_sample_digest(request(bytes(changed))))
    assert len(marks) == pytest.approx(16 * 256 / 64, abs=16)


@pytest.mark.parametrize(("size", "steps"), [(0, 1), (SLICE_BYTES - 100, 1), (4 * SLICE_BYTES, 5)])
def test_a_digest_is_computed_in_slices_and_once(size: int, steps: int) -> None:
    one = request(bytes(size))
    reading = FingerprintTask(one)
    assert [reading.step() for _ in range(steps)] == [False] * (steps - 1) + [True]
    assert one.digest == compute_digest(request(bytes(size)))
    one.frames = ()  # nothing is read again
    assert compute_digest(one) == one.digest
    assert FingerprintTask(one).step()


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_same_bytes_in_memory_of_the_client_are_the_same_content(size: int) -> None:
    descriptor = memfd.create(size + 7)
    os.pwrite(descriptor, b"1", 7)
    framed = request(b"1" + bytes(size - 1), b"456")
    placed = request(b"", b"456")
    placed.description, placed.frames = framed.description, framed.frames[1:]
    placed.nbytes, placed.locations = (
        3,
        TensorLocations({0: TensorLocation(SharedRegion(1, descriptor, size + 7, os.close), 7, size)}, {}),
    )
    assert (placed.content_bytes, is_small(placed)) == (framed.nbytes, is_small(framed))
    before = os.fstat(descriptor).st_blocks
    assert (compute_sample_digest(placed), compute_digest(placed)) == (
        compute_sample_digest(framed),
        compute_digest(framed),
    )
    # Memory that was never written to takes none by being looked at.
    assert os.fstat(descriptor).st_blocks == before


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_content_that_was_read_stays_the_same_though_its_client_changes_it(size: int) -> None:
    descriptor = memfd.create(size)
    placed = request(bytes(size))
    placed.frames, placed.nbytes = (), 0
    placed.locations = TensorLocations({0: TensorLocation(SharedRegion(1, descriptor, size, os.close), 0, size)}, {})
    digest = compute_digest(placed)
    os.pwrite(descriptor, b"1" * size, 0)
    assert (compute_sample_digest(placed), compute_digest(placed)) == (
        compute_sample_digest(request(bytes(size))),
        digest,
    )
