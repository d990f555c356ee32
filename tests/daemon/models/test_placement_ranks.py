"""The cards of a group of ranks: all have room, and one free port, or nothing is promised."""

from __future__ import annotations

import pytest

from weightd_daemon.models.placement import CardGroup, DeviceBudget, ResourceRequest
from weightd_daemon.platform.memory import MIB

SLICES = (100 * MIB, 50 * MIB)
NEED = ResourceRequest(sum(SLICES), 1, 2, 2, process_bytes=10 * MIB, buffer_bytes=400 * MIB, slice_bytes=SLICES)


def cards(*capacities: int | None, ports: tuple[int, ...] = ()) -> tuple[CardGroup, list[DeviceBudget]]:
    devices = [DeviceBudget(f"ascend:{card}", capacity) for card, capacity in enumerate(capacities)]
    return CardGroup(devices, ports), devices


def test_each_card_has_the_slice_of_its_rank_and_its_own_buffers() -> None:
    group, devices = cards(None, None)
    assert (group.name, group.reserve("big.1", NEED)) == ("ascend:0+ascend:1", "")
    assert [each.reserved_bytes // MIB for each in devices] == [102 + 10 + 400, 52 + 10 + 400]
    assert [each.process_count for each in devices] == [1, 1]
    group.set_process_bytes("big.1", 30 * MIB)
    assert [each.reserved_bytes // MIB for each in devices] == [102 + 30 + 400, 52 + 30 + 400]


def test_where_one_card_has_no_room_none_is_promised() -> None:
    group, devices = cards(None, 400 * MIB)
    assert group.reserve("big.1", NEED) == (
        "ascend:1 has not enough memory: big.1 needs 462 MiB (one copy of 52 MiB weights, one process of 10 MiB, "
        "communication of 400 MiB), 400 MiB of 400 MiB are free"
    )
    devices[1].capacity_bytes, devices[0].max_processes = None, 0
    assert group.reserve("big.1", NEED) == "ascend:0 takes at most 0 processes: big.1 needs 1 (its rank)"
    assert [each.reserved for each in devices] == [{}, {}]


@pytest.mark.parametrize("ports", [(16666,), ()])
def test_a_second_group_needs_a_port_of_its_own(ports: tuple[int, ...]) -> None:
    group, devices = cards(None, None, ports=ports)
    assert group.reserve("big.1", NEED) == ""
    told, has = ("of device_ports 16666 ", "16666") if ports else ("", "its own")
    assert group.rejection_reason("big.2", NEED) == (
        f"no port {told}is free for the communication of big.2: "
        f"big.1 has {has} on ascend:0; big.1 has {has} on ascend:1"
    )
    assert group.rejection_reason("big.2", NEED, excluding=["big.1"]) == ""
    group.release("big.1")
    assert (group.reserve("big.2", NEED), [{*each.reserved} for each in devices]) == ("", [{"big.2"}] * 2)


def test_it_has_the_first_port_that_is_free_on_all_cards() -> None:
    devices = [DeviceBudget(f"ascend:{card}") for card in range(3)]
    first, second = CardGroup(devices[:2], (7000, 7001)), CardGroup(devices[1:], (7000, 7001))
    assert [group.reserve(label, NEED) for group, label in ((first, "a.1"), (second, "b.1"))] == ["", ""]
    assert (first.port("a.1"), second.port("b.1")) == (7000, 7001)
    first.release("a.1")
    # One card is enough to have it taken.
    fourth = CardGroup(devices[:2], (7001, 7002))
    assert (fourth.reserve("c.1", NEED), fourth.port("c.1")) == ("", 7002)
    fourth.release("c.1")
    third = CardGroup(devices[:2], (7000, 7001))
    third.restore("a.2", NEED, 7001)
    assert (third.port("a.2"), third.reserve("a.3", NEED), third.port("a.3")) == (7001, "", 7000)


def test_who_waits_is_told_when_all_cards_are_free_again() -> None:
    group, devices = cards(None, None)
    group.reserve("big.1", NEED)
    group.mark_leaving(["big.1"])
    assert (group.leaving, {*devices[1].leaving}) == ({"big.1"}, {"big.1"})
    told: list[str] = []
    group.wait_for_release("big.2", lambda: told.append(group.rejection_reason("big.2", NEED)))
    assert group.waiting == {"big.2"}
    group.release("big.1")
    assert (told, group.leaving, group.reserve("big.2", NEED), group.waiting) == (["", ""], set(), "", set())


def test_a_card_says_itself_what_is_free() -> None:
    group, devices = cards(None, None)
    group.set_free_bytes(7 * MIB, 1)
    assert [each.free_bytes for each in devices] == [None, 7 * MIB]
