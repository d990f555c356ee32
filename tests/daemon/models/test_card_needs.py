"""Tests of the memory that models on demand reserve on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weightd_daemon.models.lifecycle import LifecycleLimits, ModelLifecycle
from weightd_daemon.models.placement import DeviceBudget, ResourceRequest

MIB = 2**20
CARD = "ascend:0"

# A model with small files, a holder and a worker, before the memory of its processes is known.
REQUEST = ResourceRequest(MIB, 1, 1, 2, 0)
PROCESS_MIB = 200


def stub_model(name: str) -> Any:
    loading = SimpleNamespace(is_evictable=True, last_used_at=0.0, owner="", is_unloaded=False, unload=lambda now: None)
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(is_on_demand=True, idle_unload=0.0),
        loading=loading,
        successor=None,
        dispatcher=SimpleNamespace(queued_by_tenant=[], is_idle=False),
    )


def make(capacity_mib: int) -> tuple[ModelLifecycle, DeviceBudget]:
    models = {name: stub_model(name) for name in "ab"}
    card = DeviceBudget(CARD, capacity_bytes=capacity_mib * MIB)
    return ModelLifecycle(LifecycleLimits(max_loading=8), models.get, {CARD: card}, clock=lambda: 1.0), card


def load(lifecycle: ModelLifecycle, card: DeviceBudget, label: str) -> None:
    assert lifecycle.admit(label, REQUEST, CARD).is_granted
    assert not card.reserve(label, REQUEST)
    card.set_process_bytes(label, PROCESS_MIB * MIB)
    lifecycle.on_serving(label)
    lifecycle.tick(1.0)


def test_reservation_is_raised_to_the_observed_memory() -> None:
    lifecycle, card = make(1000)
    load(lifecycle, card, "a.1")
    assert lifecycle.reservations.reserved_bytes(CARD) == card.reserved_bytes > 2 * PROCESS_MIB * MIB


def test_next_model_waits_for_the_memory_that_others_took() -> None:
    lifecycle, card = make(3 * PROCESS_MIB)
    load(lifecycle, card, "a.1")
    verdict = lifecycle.admit("b.1", REQUEST, CARD)
    assert (verdict.is_granted, verdict.rejection_reason) == (False, "")


def test_model_is_not_refused_because_of_an_estimate() -> None:
    lifecycle, card = make(2 * PROCESS_MIB - 1)
    assert lifecycle.admit("a.1", REQUEST, CARD).is_granted
    card.reserve("a.1", REQUEST)
    card.set_process_bytes("a.1", PROCESS_MIB * MIB)
    assert not lifecycle.admit("b.1", REQUEST, CARD).rejection_reason
