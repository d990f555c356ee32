"""Tests of the commands load and retry where a load is refused, or is repeated by the daemon itself."""

from __future__ import annotations

from weightd_daemon.models.lifecycle import LifecycleLimits
from weightd_protocol.errors import ResourceExhausted

from .test_lifecycle import MIB, MODEL_MIB, LifecycleHarness


def test_load_beyond_budget_of_tenant_reports_it() -> None:
    limits = LifecycleLimits(tenant_limits={"ann": MODEL_MIB * MIB - 1}, max_loading=8)
    harness = LifecycleHarness(limits, a="manual")
    harness.lifecycle.load(harness["a"], "ann", harness.done.append)
    harness.settle()
    [error] = harness.done
    assert isinstance(error, ResourceExhausted)
    assert "max_model_bytes of this tenant" in str(error)
    assert (harness.loaded, harness.processes["a"]) == (set(), 0)


def test_retry_joins_an_attempt_in_progress() -> None:
    harness = LifecycleHarness(a="manual")
    loading = harness["a"].loading
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    source = harness.host.requested_snapshots[-1]
    harness["a"].on_snapshot_failed(source, "No space left on device", harness.now, is_transient=True)
    harness["a"].tick(harness.now)
    harness.lifecycle.tick(harness.now)
    assert (loading.may_retry, loading.is_retrying) == (True, False)
    harness.now += 60.0
    harness["a"].tick(harness.now)
    assert (loading.may_retry, loading.is_retrying) == (False, True)
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    harness.settle()
    assert (harness.loaded, harness.done[-1], loading.is_retrying) == ({"a"}, None, False)
