from __future__ import annotations

import itertools
import os

import pytest

from weightd_common import memfd
from weightd_daemon.scheduling.fault_isolation import contents as quarantine_module
from weightd_daemon.scheduling.fault_isolation.contents import (
    MAX_HANGS,
    QUARANTINE_S,
    SLICE_BYTES,
    SMALL_BYTES,
    FingerprintTask,
    Quarantine,
    compute_digest,
    compute_sample_digest,
    is_small,
)
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.errors import Internal
from weightd_protocol.messages.inference import RequestDescription, TensorSpec

_numbers = itertools.count(1)


def request(*frames: bytes, names: str = "ab") -> Request:
    frames = frames or (b"abc",)
    specs = tuple(TensorSpec(name, "UINT8", (len(frame),)) for name, frame in zip(names, frames, strict=False))
    number = next(_numbers)
    return Request(number, b"c", f"id{number}", RequestDescription("m", specs), frames, 0.0, 1e9, sum(map(len, frames)))


def shared(owner: str, content: bytes = b"abc") -> Request:
    """A request with this content in shared memory of the client `owner`."""
    made = request(content)
    descriptor = memfd.create(len(content))
    os.pwrite(descriptor, content, 0)
    made.locations = TensorLocations(
        {0: TensorLocation(SharedRegion(1, descriptor, len(content), os.close), 0, len(content))}, {}
    )
    made.frames, made.nbytes, made.origin = (), 0, ClientOrigin(f"{owner} 1", owner)
    return made


def without_content() -> Request:
    """A request of the usual size whose content cannot be read: any attempt to compute its digest fails."""
    made = request()
    made.frames = ()
    return made


@pytest.fixture
def quarantine(monkeypatch: pytest.MonkeyPatch) -> Quarantine:
    monkeypatch.setattr(quarantine_module, "_MAX_CONTENTS", 4)
    return Quarantine()


def test_quarantine_refuses_only_the_content_and_expires(quarantine: Quarantine) -> None:
    quarantine.check_request(request(), 0.0)
    quarantine.add(request(), 100.0)
    with pytest.raises(Internal, match=r"it is quarantined for 299 s more$"):
        quarantine.check_request(request(), 101.0)
    quarantine.check_request(request(b"abd"), 101.0)
    quarantine.check_request(request(b"abcd"), 101.0)
    assert quarantine.count(101.0) == 1
    quarantine.check_request(request(), 100.0 + QUARANTINE_S)
    assert quarantine.count(100.0 + QUARANTINE_S) == 0


def test_quarantines_after_a_second_hang(quarantine: Quarantine) -> None:
    for _ in range(MAX_HANGS - 1):
        assert not quarantine.on_hang(request(), 0.0)
        quarantine.check_request(request(), 1.0)
    assert quarantine.on_hang(request(), 2.0)
    with pytest.raises(Internal):
        quarantine.check_request(request(), 3.0)


def test_answered_content_is_not_suspected(quarantine: Quarantine) -> None:
    for _ in range(5):
        assert not quarantine.on_hang(request(), 0.0)
        quarantine.on_answered(request(), 0.0)
    assert not quarantine.on_hang(request(), 0.0)
    quarantine.on_answered(request(b"abd"), 0.0)  # other content of the same size
    assert quarantine.on_hang(request(), 0.0)


def test_clear_forgets_everything(quarantine: Quarantine) -> None:
    quarantine.add(request(), 0.0)
    quarantine.on_hang(request(b"abd"), 0.0)
    quarantine.clear()
    quarantine.check_request(request(), 1.0)
    assert not quarantine.on_hang(request(b"abd"), 1.0)


def test_forgets_the_oldest_content_beyond_the_limit(quarantine: Quarantine) -> None:
    for number in range(5):
        quarantine.add(request(b"%d" % number), number / 10)
        assert not quarantine.on_hang(request(b"s%d" % number), 0.0)
    assert quarantine.count(0.0) == 4
    quarantine.check_request(request(b"0"), 0.5)
    with pytest.raises(Internal):
        quarantine.check_request(request(b"4"), 0.5)
    assert not quarantine.on_hang(request(b"s0"), 0.0)
    assert quarantine.on_hang(request(b"s4"), 0.0)


def test_quarantined_content_is_no_longer_suspected(quarantine: Quarantine) -> None:
    quarantine.on_hang(request(), 0.0)
    quarantine.add(request(), 0.0)  # workers crashed because of it, too
    assert quarantine.count(QUARANTINE_S) == 0
    assert not quarantine.on_hang(request(), QUARANTINE_S)


def test_suspicion_expires(quarantine: Quarantine) -> None:
    assert not quarantine.on_hang(request(), 0.0)
    assert quarantine.may_be_suspected(request(), QUARANTINE_S - 0.1)
    assert not quarantine.on_hang(request(), QUARANTINE_S)
    assert not quarantine.may_be_suspected(without_content(), 2 * QUARANTINE_S)


def test_repeated_quarantine_does_not_extend_others(quarantine: Quarantine) -> None:
    one, other = request(b"one"), request(b"two")
    quarantine.add(one, 0.0)
    quarantine.add(other, 1.0)
    quarantine.add(one, 299.0)  # it was still running on other workers when it was quarantined
    quarantine.check_request(other, 302.0)


def test_computes_no_digest_for_unknown_sizes() -> None:
    others, cleared, expired = Quarantine(), Quarantine(), Quarantine()
    others.add(request(b"abcd"), 0.0)
    others.on_hang(request(b"abcd"), 0.0)
    for each in (cleared, expired):
        each.add(request(), 0.0)
    cleared.clear()
    assert expired.count(QUARANTINE_S) == 0
    for each in (others, cleared, expired):
        each.check_request(without_content(), 0.0)
        each.on_answered(without_content(), 0.0)


def test_checks_quarantine_on_request_and_suspects_on_answer(quarantine: Quarantine) -> None:
    quarantine.add(request(), 0.0)
    quarantine.on_answered(without_content(), 0.0)
    quarantine.clear()
    quarantine.on_hang(request(), 0.0)
    quarantine.check_request(without_content(), 0.0)


def test_shared_memory_content_is_refused_to_its_owner_only(quarantine: Quarantine) -> None:
    quarantine.add(shared("ann"), 0.0)
    for other_content in (request(), shared("bob"), shared("ann", b"abd")):
        quarantine.check_request(other_content, 1.0)
    with pytest.raises(Internal):
        quarantine.check_request(shared("ann"), 1.0)


def test_message_content_is_refused_to_every_client(quarantine: Quarantine) -> None:
    quarantine.add(request(), 0.0)
    for equal_content in (request(), shared("ann"), shared("bob")):
        with pytest.raises(Internal):
            quarantine.check_request(equal_content, 1.0)


def test_shared_memory_does_not_affect_other_clients(quarantine: Quarantine) -> None:
    for _ in range(MAX_HANGS - 1):
        quarantine.on_hang(request(), 0.0)
        quarantine.on_hang(shared("ann"), 0.0)
    quarantine.on_answered(shared("bob"), 0.0)
    quarantine.on_answered(shared("ann"), 0.0)
    assert not quarantine.on_hang(shared("ann"), 0.0)
    assert not quarantine.on_hang(shared("bob"), 0.0)
    assert quarantine.on_hang(request(), 0.0)


SIZES = [0, 1, 255, 256, 257, SMALL_BYTES, SMALL_BYTES + 1, SLICE_BYTES, 3 * SLICE_BYTES + 5]


@pytest.mark.parametrize("size", SIZES)
def test_digests_ignore_the_order_of_inputs(size: int) -> None:
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
def test_digest_covers_name_datatype_shape_and_order(others: list[TensorSpec]) -> None:
    one, other = request(b"123", b"456"), request(b"123", b"456")
    other.description = RequestDescription("m", tuple(others))
    assert compute_digest(one) != compute_digest(other)


@pytest.mark.parametrize("size", SIZES[1:])
def test_digests_differ_after_one_changed_byte(size: int) -> None:
    one, other = request(bytes(size)), request(bytes(size - 1) + b"1")
    assert compute_digest(one) != compute_digest(other)
    assert compute_sample_digest(one) != compute_sample_digest(other)  # the sample includes the last byte
    middle = request(bytes(size // 3) + b"1" + bytes(size - size // 3 - 1))
    assert compute_digest(one) != compute_digest(middle)
    assert compute_sample_digest(one) != compute_sample_digest(middle) or not is_small(one)


def test_sample_digest_reads_a_small_part() -> None:
    one = bytearray(SLICE_BYTES)
    digests = {compute_sample_digest(request(bytes(one)))}
    for index in range(0, SLICE_BYTES, 64):
        changed = bytearray(one)
        changed[index] = 1
        digests.add(compute_sample_digest(request(bytes(changed))))
    assert len(digests) == pytest.approx(16 * 256 / 64, abs=16)


@pytest.mark.parametrize(("size", "steps"), [(0, 1), (SLICE_BYTES - 100, 1), (4 * SLICE_BYTES, 5)])
def test_digest_is_computed_in_slices_and_once(size: int, steps: int) -> None:
    one = request(bytes(size))
    reading = FingerprintTask(one)
    assert [reading.step() for _ in range(steps)] == [False] * (steps - 1) + [True]
    assert one.digest == compute_digest(request(bytes(size)))
    one.frames = ()  # the content cannot be read a second time
    assert compute_digest(one) == one.digest
    assert FingerprintTask(one).step()


@pytest.mark.parametrize("size", SIZES[1:])
def test_shared_memory_has_the_digest_of_equal_frames(size: int) -> None:
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
    # Reading a hole of the memory must not allocate pages.
    assert os.fstat(descriptor).st_blocks == before


@pytest.mark.parametrize("size", SIZES[1:])
def test_digest_stays_after_the_client_changes_its_memory(size: int) -> None:
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
