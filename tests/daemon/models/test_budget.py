"""What a card is promised to, and the figures of a refusal."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.engines.ascend import MAX_PROCESSES, on_card
from weightd.daemon.host.memory import MIB
from weightd.daemon.models.budget import Device, Need

NEED = Need(weights=100 * MIB, copies=1, users=3, processes=4, process_bytes=10 * MIB)
PRIVATE = dataclasses.replace(NEED, copies=3)


@pytest.mark.parametrize(
    ("weights", "mib"),
    [(0, 2), (1, 2), (2 * MIB - 1, 2), (2 * MIB, 4), (2 * MIB + 1, 4), (100 * MIB, 102), (101 * MIB, 102)],
)
def test_weights_take_whole_huge_pages_and_one_more_where_they_fit_exactly(weights: int, mib: int) -> None:
    assert on_card(weights) == mib * MIB


def test_a_need_is_its_copies_and_its_processes() -> None:
    assert NEED.total == (102 + 4 * 10) * MIB
    assert PRIVATE.total == (3 * 102 + 4 * 10) * MIB


def test_what_is_promised_is_used_until_it_is_released() -> None:
    device = Device("ascend:0", 500 * MIB, MAX_PROCESSES)
    assert device.reserve("m.1", NEED) == ""
    assert device.reserve("m.2", PRIVATE) == ""
    assert (device.used, device.processes) == (NEED.total + PRIVATE.total, 8)
    device.release("m.1")
    device.release("m.1")
    assert (device.used, device.processes) == (PRIVATE.total, 4)


def test_what_fits_exactly_fits() -> None:
    assert Device("ascend:0", NEED.total, 4).reserve("m.1", NEED) == ""
    assert Device("ascend:0", NEED.total - 1, 4).reserve("m.1", NEED) != ""
    assert Device("ascend:0", NEED.total, 3).reserve("m.1", NEED) != ""


def test_a_device_of_which_nothing_is_known_refuses_nothing() -> None:
    device = Device("cpu")
    for number in range(100):
        assert device.reserve(f"m.{number}", NEED) == ""
    assert device.processes == 400


def test_a_refusal_for_memory_tells_the_figures_and_promises_nothing() -> None:
    device = Device("ascend:0", 1500 * MIB)
    assert device.reserve("big.1", dataclasses.replace(NEED, weights=1229 * MIB)) == ""
    assert device.reserve("m.2", PRIVATE) == (
        "ascend:0 has no room: m.2 needs 346 MiB (3 copies of 102 MiB weights, 4 processes of 10 MiB), "
        "230 MiB of 1,500 MiB are free; big.1 has 1,270 MiB"
    )
    assert list(device.promised) == ["big.1"]
    assert Device("ascend:0", 141 * MIB).reserve("m.1", NEED) == (
        "ascend:0 has no room: m.1 needs 142 MiB (one copy of 102 MiB weights, 4 processes of 10 MiB), "
        "141 MiB of 141 MiB are free"
    )


def test_a_refusal_for_processes_tells_who_has_them() -> None:
    device = Device("ascend:0", None, 9)
    assert device.reserve("a.1", NEED) == ""
    assert device.reserve("b.1", NEED) == ""
    assert device.reserve("m.1", NEED) == (
        "ascend:0 takes at most 9 processes: m.1 needs 4 (holder, workers and spares); a.1 has 4, b.1 has 4"
    )


def test_it_can_be_asked_what_would_be_refused_though_another_one_were_gone() -> None:
    device = Device("ascend:0", NEED.total, 4)
    device.reserve("m.1", NEED)
    assert device.refusal("m.2", NEED) != ""
    assert device.refusal("m.2", NEED, without="m.1") == ""
    larger = dataclasses.replace(NEED, weights=200 * MIB)
    assert "; m.1 has" not in device.refusal("m.2", larger, without="m.1")
    assert "142 MiB of 142 MiB are free" in device.refusal("m.2", larger, without="m.1")
    assert list(device.promised) == ["m.1"]


def test_it_learns_that_processes_take_more_but_not_that_they_take_less() -> None:
    device = Device("ascend:0", 150 * MIB)
    device.reserve("m.1", NEED)
    device.learn("m.1", 5 * MIB)
    assert device.used == NEED.total
    device.learn("m.1", 50 * MIB)
    assert device.used == (102 + 4 * 50) * MIB
    device.learn("nobody.1", 50 * MIB)
    assert list(device.promised) == ["m.1"]
    # More is used than there should be: nothing is free, not less than nothing.
    assert "0 MiB of 150 MiB are free" in device.reserve("m.2", NEED)


NEEDS = st.builds(
    Need, st.integers(0, 500 * MIB), st.integers(1, 5), st.integers(1, 5), st.integers(1, 20), st.integers(0, 50 * MIB)
)


@given(st.integers(0, 2000 * MIB), st.integers(1, 63), st.lists(st.tuples(st.sampled_from("abcdef"), NEEDS)))
def test_no_more_is_promised_than_there_is(capacity: int, processes: int, wanted: list[tuple[str, Need]]) -> None:
    device = Device("ascend:0", capacity, processes)
    for label, need in wanted:
        if label in device.promised:
            device.release(label)
            continue
        before = dict(device.promised)
        refusal = device.reserve(label, need)
        assert (label in device.promised) == (not refusal)
        assert {each: had for each, had in device.promised.items() if each != label} == before
        assert device.used <= capacity
        assert device.processes <= processes
