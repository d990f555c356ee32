"""Tests of device budgets: reservations on cards and card groups, and the figures in rejections."""

from __future__ import annotations

import dataclasses

import pytest

from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.models.placement import CardGroup, DeviceBudget, ResourceRequest
from weightd_daemon.platform.memory import MIB

NEED = ResourceRequest(weight_bytes=100 * MIB, copy_count=1, worker_count=3, process_count=4, process_bytes=10 * MIB)
PRIVATE = dataclasses.replace(NEED, copy_count=3)


@pytest.mark.parametrize(
    ("weights", "mib"),
    [(0, 2), (1, 2), (2 * MIB - 1, 2), (2 * MIB, 4), (2 * MIB + 1, 4), (100 * MIB, 102), (101 * MIB, 102)],
)
def test_weights_use_whole_huge_pages(weights: int, mib: int) -> None:
    assert card_bytes(weights) == mib * MIB


def test_reservation_counts_until_release() -> None:
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
def test_exact_fit_is_accepted_and_unknown_capacity_unlimited(
    capacity: int | None, processes: int | None, fits: bool
) -> None:
    device = DeviceBudget("ascend:0", capacity, processes)
    assert (device.reserve("m.1", NEED) == "") == fits
    assert list(device.reserved) == ["m.1"] * fits


def test_memory_rejection_has_figures() -> None:
    device = DeviceBudget("ascend:0", 1500 * MIB)
    assert device.reserve("big.1", dataclasses.replace(NEED, weight_bytes=1229 * MIB)) == ""
    assert device.reserve("m.2", PRIVATE) == (
        "ascend:0 does not have enough memory: m.2 needs 346 MiB (3 copies of 102 MiB weights, 4 processes of 10 MiB), "
        "230 MiB of 1,500 MiB are free; big.1 has 1,270 MiB"
    )
    assert DeviceBudget("ascend:0", 141 * MIB).reserve("m.1", NEED) == (
        "ascend:0 does not have enough memory: m.1 needs 142 MiB (one copy of 102 MiB weights, 4 processes of 10 MiB), "
        "141 MiB of 141 MiB are free"
    )


def test_process_rejection_names_other_models() -> None:
    device = DeviceBudget("ascend:0", None, 9)
    assert [device.reserve(label, NEED) for label in ("a.1", "b.1")] == ["", ""]
    assert device.reserve("m.1", NEED) == (
        "ascend:0 takes at most 9 processes: m.1 needs 4 (holder, workers and spares); a.1 has 4, b.1 has 4"
    )


def test_rejection_reason_can_exclude_generations() -> None:
    device = DeviceBudget("ascend:0", NEED.total_bytes, 4)
    device.reserve("m.1", NEED)
    assert device.rejection_reason("m.2", NEED) != ""
    assert device.rejection_reason("m.2", NEED, excluding=["m.1"]) == ""
    refusal = device.rejection_reason("m.2", PRIVATE, excluding=["m.1"])
    assert refusal.endswith("142 MiB of 142 MiB are free")
    assert list(device.reserved) == ["m.1"]


def test_process_memory_estimate_only_grows() -> None:
    device = DeviceBudget("ascend:0", 150 * MIB)
    device.reserve("m.1", NEED)
    for seen, each in [(5, 10), (50, 50)]:
        device.set_process_bytes("m.1", seen * MIB)
        device.set_process_bytes("unknown.1", seen * MIB)
        assert (list(device.reserved), device.reserved_bytes) == (["m.1"], (102 + 4 * each) * MIB)
    # More memory is used than the capacity; the free memory is reported as 0, not as a negative number.
    assert "0 MiB of 150 MiB are free" in device.reserve("m.2", NEED)


SLICES = (100 * MIB, 50 * MIB)
GROUP_NEED = ResourceRequest(sum(SLICES), 1, 2, 2, process_bytes=10 * MIB, buffer_bytes=400 * MIB, slice_bytes=SLICES)


def cards(*capacities: int | None, ports: tuple[int, ...] = ()) -> tuple[CardGroup, list[DeviceBudget]]:
    devices = [DeviceBudget(f"ascend:{card}", capacity) for card, capacity in enumerate(capacities)]
    return CardGroup(devices, ports), devices


def test_each_card_reserves_slice_and_buffers() -> None:
    group, devices = cards(None, None)
    assert (group.name, group.reserve("big.1", GROUP_NEED)) == ("ascend:0+ascend:1", "")
    assert [each.reserved_bytes // MIB for each in devices] == [102 + 10 + 400, 52 + 10 + 400]
    assert [each.process_count for each in devices] == [1, 1]
    group.set_process_bytes("big.1", 30 * MIB)
    assert [each.reserved_bytes // MIB for each in devices] == [102 + 30 + 400, 52 + 30 + 400]


def test_group_reserves_all_cards_or_none() -> None:
    group, devices = cards(None, 400 * MIB)
    assert group.reserve("big.1", GROUP_NEED) == (
        "ascend:1 does not have enough memory: big.1 needs 462 MiB (one copy of 52 MiB weights, one process of 10 MiB, "
        "communication of 400 MiB), 400 MiB of 400 MiB are free"
    )
    devices[1].capacity_bytes, devices[0].max_processes = None, 0
    assert group.reserve("big.1", GROUP_NEED) == "ascend:0 takes at most 0 processes: big.1 needs 1 (its rank)"
    assert [each.reserved for each in devices] == [{}, {}]


@pytest.mark.parametrize("ports", [(16666,), ()])
def test_second_group_needs_another_port(ports: tuple[int, ...]) -> None:
    group, devices = cards(None, None, ports=ports)
    assert group.reserve("big.1", GROUP_NEED) == ""
    reported, has = ("of device_ports 16666 ", "16666") if ports else ("", "its own")
    assert group.rejection_reason("big.2", GROUP_NEED) == (
        f"no port {reported}is free for the communication of big.2: "
        f"big.1 has {has} on ascend:0; big.1 has {has} on ascend:1"
    )
    assert group.rejection_reason("big.2", GROUP_NEED, excluding=["big.1"]) == ""
    group.release("big.1")
    assert (group.reserve("big.2", GROUP_NEED), [{*each.reserved} for each in devices]) == ("", [{"big.2"}] * 2)


def test_uses_first_port_free_on_all_cards() -> None:
    devices = [DeviceBudget(f"ascend:{card}") for card in range(3)]
    first, second = CardGroup(devices[:2], (7000, 7001)), CardGroup(devices[1:], (7000, 7001))
    assert [group.reserve(label, GROUP_NEED) for group, label in ((first, "a.1"), (second, "b.1"))] == ["", ""]
    assert (first.port("a.1"), second.port("b.1")) == (7000, 7001)
    first.release("a.1")
    # A port that is in use on one card of the group is not available.
    fourth = CardGroup(devices[:2], (7001, 7002))
    assert (fourth.reserve("c.1", GROUP_NEED), fourth.port("c.1")) == ("", 7002)
    fourth.release("c.1")
    third = CardGroup(devices[:2], (7000, 7001))
    third.restore("a.2", GROUP_NEED, 7001)
    assert (third.port("a.2"), third.reserve("a.3", GROUP_NEED), third.port("a.3")) == (7001, "", 7000)


def test_waiting_deployment_is_woken_by_release_of_all_cards() -> None:
    group, devices = cards(None, None)
    group.reserve("big.1", GROUP_NEED)
    group.mark_leaving(["big.1"])
    assert (group.leaving, {*devices[1].leaving}) == ({"big.1"}, {"big.1"})
    reported: list[str] = []
    group.wait_for_release("big.2", lambda: reported.append(group.rejection_reason("big.2", GROUP_NEED)))
    assert group.waiting == {"big.2"}
    group.release("big.1")
    assert (reported, group.leaving, group.reserve("big.2", GROUP_NEED), group.waiting) == (["", ""], set(), "", set())


def test_card_reports_its_free_memory() -> None:
    group, devices = cards(None, None)
    group.set_free_bytes(7 * MIB, 1)
    assert [each.free_bytes for each in devices] == [None, 7 * MIB]
