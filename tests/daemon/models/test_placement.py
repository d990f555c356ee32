"""What a card is promised to, and the figures of a refusal."""

from __future__ import annotations

import dataclasses

import pytest

from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.models.placement import DeviceBudget, ResourceRequest
from weightd_daemon.platform.memory import MIB

NEED = ResourceRequest(weight_bytes=100 * MIB, copy_count=1, worker_count=3, process_count=4, process_bytes=10 * MIB)
PRIVATE = dataclasses.replace(NEED, copy_count=3)


@pytest.mark.parametrize(
    ("weights", "mib"),
    [(0, 2), (1, 2), (2 * MIB - 1, 2), (2 * MIB, 4), (2 * MIB + 1, 4), (100 * MIB, 102), (101 * MIB, 102)],
)
def test_weights_take_whole_huge_pages_and_one_more_where_they_fit_exactly(weights: int, mib: int) -> None:
    assert card_bytes(weights) == mib * MIB


def test_what_is_promised_is_used_until_it_is_released() -> None:
    device = DeviceBudget("ascend:0", 500 * MIB, 8)
    assert device.reserve("m.1", NEED) == ""
    assert device.reserve("m.2", PRIVATE) == ""
    assert (device.reserved_bytes, device.process_count) == ((102 + 4 * 10 + 3 * 102 + 4 * 10) * MIB, 8)
    for _ in range(2):
        device.release("m.1")
        assert (device.reserved_bytes, device.process_count) == (PRIVATE.total_bytes, 4)


@pytest.mark.parametrize(
    ("capacity", "processes", "fits"),
    [(NEED.total_bytes, 4, True), (NEED.total_bytes - 1, 4, False), (NEED.total_bytes, 3, False), (None, None, True)],
)
def test_what_fits_exactly_fits_and_what_is_not_known_refuses_nothing(
    capacity: int | None, processes: int | None, fits: bool
) -> None:
    device = DeviceBudget("ascend:0", capacity, processes)
    assert (device.reserve("m.1", NEED) == "") == fits
    assert list(device.reserved) == ["m.1"] * fits


def test_a_refusal_for_memory_tells_the_figures() -> None:
    device = DeviceBudget("ascend:0", 1500 * MIB)
    assert device.reserve("big.1", dataclasses.replace(NEED, weight_bytes=1229 * MIB)) == ""
    assert device.reserve("m.2", PRIVATE) == (
        "ascend:0 has not enough memory: m.2 needs 346 MiB (3 copies of 102 MiB weights, 4 processes of 10 MiB), "
        "230 MiB of 1,500 MiB are free; big.1 has 1,270 MiB"
    )
    assert DeviceBudget("ascend:0", 141 * MIB).reserve("m.1", NEED) == (
        "ascend:0 has not enough memory: m.1 needs 142 MiB (one copy of 102 MiB weights, 4 processes of 10 MiB), "
        "141 MiB of 141 MiB are free"
    )


def test_a_refusal_for_processes_tells_who_has_them() -> None:
    device = DeviceBudget("ascend:0", None, 9)
    assert [device.reserve(label, NEED) for label in ("a.1", "b.1")] == ["", ""]
    assert device.reserve("m.1", NEED) == (
        "ascend:0 takes at most 9 processes: m.1 needs 4 (holder, workers and spares); a.1 has 4, b.1 has 4"
    )


def test_it_can_be_asked_what_would_be_refused_though_another_one_were_gone() -> None:
    device = DeviceBudget("ascend:0", NEED.total_bytes, 4)
    device.reserve("m.1", NEED)
    assert device.rejection_reason("m.2", NEED) != ""
    assert device.rejection_reason("m.2", NEED, excluding=["m.1"]) == ""
    refusal = device.rejection_reason("m.2", PRIVATE, excluding=["m.1"])
    assert refusal.endswith("142 MiB of 142 MiB are free")
    assert list(device.reserved) == ["m.1"]


def test_it_learns_that_processes_take_more_but_not_that_they_take_less() -> None:
    device = DeviceBudget("ascend:0", 150 * MIB)
    device.reserve("m.1", NEED)
    for seen, each in [(5, 10), (50, 50)]:
        device.set_process_bytes("m.1", seen * MIB)
        device.set_process_bytes("nobody.1", seen * MIB)
        assert (list(device.reserved), device.reserved_bytes) == (["m.1"], (102 + 4 * each) * MIB)
    # More is used than there should be: nothing is free, not less than nothing.
    assert "0 MiB of 150 MiB are free" in device.reserve("m.2", NEED)
