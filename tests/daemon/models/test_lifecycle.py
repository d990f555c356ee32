"""Tests of loading on demand, unloading and budgets, with real models on a fake host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from testkit.model_factory import model_factory
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.models.lifecycle import LifecycleLimits, ModelLifecycle
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.models.residency.reservations import HOST, Budgets, Residence
from weightd_daemon.models.residency.table import Grant, ResidencyTable, Unload
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import FailedPrecondition, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.messages.inference import ResponseDescription
from weightd_protocol.messages.worker import Hello, PredictResult
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, BUILT, CPU, OUT, SHA, FakeHost, request

MIB = 2**20

# The estimated memory of a model with one worker: its file, the holder and the worker.
MODEL_MIB = 100 + 2 * 12
FILE_BYTES = 100 * MIB

ANN, BOB = (Tenant(name, TenantConfig()) for name in ("ann", "bob"))


class LifecycleHarness:
    """Models of a daemon on a fake host, with a fake clock; `settle` performs what is due."""

    def __init__(self, limits: LifecycleLimits | None = None, **loads: str) -> None:
        self.host = FakeHost()
        self.now = 1000.0
        self.done: list[RequestError | None] = []
        self.charged: dict[str, float] = {}
        self.measured: dict[str, int] = {}
        self.lifecycle = ModelLifecycle(
            limits or LifecycleLimits(max_loading=8),
            lambda name: self.registry.models.get(name),  # noqa: PLW0108 - the registry is made next
            {},
            self.charge,
            lambda name: self.measured.pop(name, None),
            lambda: self.now,
        )
        factory = model_factory({"cpu": DeviceBudget("cpu")}, self.host, self.host, lifecycle=self.lifecycle)
        self.registry = ModelRegistry(factory.make)
        self.configs = {name: config(name, load) for name, load in loads.items()}
        self.registry.start(self.configs, self.now)
        self.settle()

    def charge(self, tenant: str, model: str, byte_seconds: float) -> None:
        self.charged[tenant] = self.charged.get(tenant, 0.0) + byte_seconds

    def __getitem__(self, name: str) -> ServedModel:
        return self.registry.models[name]

    def submit(self, name: str, tenant: Tenant = ANN, deadline_s: float = 30.0) -> int:
        """Do what the router does with a request."""
        each = request(deadline=self.now + deadline_s)
        each.tenant, each.arrived_at = tenant, self.now
        loading = self[name].loading
        if loading.is_unloaded:
            loading.load_on_demand(tenant.name)
        loading.last_used_at = self.now
        self[name].dispatcher.infer(each, self.now)
        return each.number

    def settle(self) -> None:
        """Take snapshots, let processes load and exit, and perform what is due, until nothing changes."""
        for _ in range(20):
            self.lifecycle.tick(self.now)
            self.registry.reconcile(self.now)
            for model in self.registry.all_models():
                self.advance(model)

    def advance(self, model: ServedModel) -> None:
        model.tick(self.now)
        source = model.versions.current
        for deployment in model.deployments:
            if deployment.is_awaiting_snapshot(source) and model.versions.snapshots.find(source) is None:
                snapshot = Snapshot(f"/snapshots/{source.number}", "", SHA, FILE_BYTES)
                model.on_snapshot_taken(source, snapshot, self.now)
            events = model.deployments.process_events
            loading = deployment.loading
            if loading is not None and f"{loading.label}.holder" in loading.children and loading.built is None:
                for name in list(loading.children):
                    events.on_message(name, Hello(name, SHA, {"weightd": VERSION}, CPU), [], self.now)
                events.on_message(f"{loading.label}.holder", BUILT, [], self.now)
                for name in [each for each in loading.children if not each.endswith(".holder")]:
                    events.on_message(name, ATTACHED, [], self.now)
            for draining in list(deployment.draining):
                for name in [each.name for each in draining.processes.alive()]:
                    events.on_exit(name, ExitCause(0), self.now)

    def answer(self, name: str, number: int) -> None:
        worker = f"{next(iter(self[name].deployments)).main_generation.label}.w1"
        result = PredictResult(number, ResponseDescription("m", (OUT,)))
        self[name].deployments.process_events.on_message(worker, result, [], self.now)

    def serve(self, name: str, tenant: Tenant = ANN) -> None:
        """Answer a new request."""
        number = self.submit(name, tenant)
        self.settle()
        self.answer(name, number)
        assert number in self.host.answers
        self.now += 1.0

    @property
    def loaded(self) -> set[str]:
        return {name for name, model in self.registry.models.items() if model.readiness.is_serving}

    @property
    def processes(self) -> Mapping[str, int]:
        return {
            name: sum(len(list(each.processes.alive())) for each in model.deployments.generations)
            for name, model in self.registry.models.items()
        }


def config(name: str, load: str) -> ModelConfig:
    return ModelConfig(
        f"/models/{name}.onnx", "onnxruntime", workers=1, start="spawn", load=load, idle_unload=60.0, spares=0
    )


def budget(models: int, **limits: Any) -> LifecycleLimits:
    """Return a budget for a number of models."""
    return LifecycleLimits(max_model_bytes=models * MODEL_MIB * MIB, max_loading=8)._replace(**limits)


def test_on_demand_model_loads_with_its_first_request() -> None:
    harness = LifecycleHarness(a="on_demand", b="start")
    assert (harness.loaded, harness.processes["a"]) == ({"b"}, 0)
    assert harness["a"].readiness.state_name == "unloaded"
    first, second = harness.submit("a"), harness.submit("a")
    harness.settle()
    harness.answer("a", first)
    harness.answer("a", second)
    assert harness.host.answers == [first, second]
    assert harness["a"].loading.owner == "ann"


def test_manual_model_refuses_requests_until_it_is_loaded() -> None:
    harness = LifecycleHarness(a="manual")
    with pytest.raises(FailedPrecondition, match="a is not loaded; load it with: weightctl load a"):
        harness.submit("a")
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    harness.settle()
    assert (harness.done, harness.loaded) == ([None], {"a"})
    harness.serve("a")


def test_idle_on_demand_model_is_unloaded_and_others_are_not() -> None:
    harness = LifecycleHarness(a="on_demand", b="start", c="manual")
    harness.lifecycle.load(harness["c"], "", harness.done.append)
    harness.serve("a")
    harness.now += 58.0
    harness.settle()
    assert harness.loaded == {"a", "b", "c"}
    harness.now += 2.0
    harness.settle()
    assert (harness.loaded, harness.processes["a"]) == ({"b", "c"}, 0)
    harness.serve("a")


def test_least_recently_used_model_makes_room() -> None:
    harness = LifecycleHarness(budget(2), a="on_demand", b="on_demand", c="on_demand")
    for name in ("a", "b", "a"):
        harness.serve(name)
    harness.serve("c")
    assert harness.loaded == {"a", "c"}
    assert harness.lifecycle.reservations.reserved_bytes(HOST) == 2 * MODEL_MIB * MIB


def test_model_with_requests_and_pinned_model_are_not_unloaded() -> None:
    harness = LifecycleHarness(budget(2), a="start", b="on_demand", c="on_demand")
    number = harness.submit("b")
    harness.settle()
    waiting = harness.submit("c")
    harness.settle()
    assert harness.loaded == {"a", "b"}
    assert harness["c"].readiness.state_name == "snapshotting"
    harness.answer("b", number)
    harness.settle()
    assert harness.loaded == {"a", "c"}
    harness.answer("c", waiting)
    assert harness.host.answers == [number, waiting]


def test_model_stays_loaded_for_min_resident() -> None:
    harness = LifecycleHarness(budget(1, min_resident_s=10.0), a="on_demand", b="on_demand")
    harness.serve("a")
    harness.submit("b")
    harness.settle()
    assert harness.loaded == {"a"}
    harness.now += 10.0
    harness.settle()
    assert harness.loaded == {"b"}


@pytest.mark.parametrize("load", ["on_demand", "manual"])
def test_model_larger_than_the_budget_fails(load: str) -> None:
    harness = LifecycleHarness(budget(1, max_model_bytes=MODEL_MIB * MIB - 1), c=load)
    harness.lifecycle.load(harness["c"], "", harness.done.append)
    harness.settle()
    [error] = harness.done
    assert isinstance(error, FailedPrecondition)
    assert f"c needs {MODEL_MIB} MiB, but max_model_bytes is" in str(error)
    assert harness["c"].readiness.has_failed


def test_model_beside_models_that_stay_is_refused_and_fits_later() -> None:
    harness = LifecycleHarness(budget(2), a="start", b="start", c="on_demand")
    need = f"c needs {MODEL_MIB} MiB, but max_model_bytes is {2 * MODEL_MIB} MiB, of which {2 * MODEL_MIB} MiB cannot"
    for _ in range(2):
        number = harness.submit("c")
        harness.settle()
        [(_, code, text)] = [each for each in harness.host.refusals if each[0] == number]
        assert (code, need in text) == ("RESOURCE_EXHAUSTED", True)
        assert harness.loaded == {"a", "b"}
        assert harness["c"].loading.is_unloaded
    harness.lifecycle.configure(budget(3))
    harness.serve("c")
    # The processes of the previous generation have not exited yet when the next one is refused.
    harness["c"].loading.unload(harness.now)
    harness.lifecycle.configure(budget(2))
    number = harness.submit("c")
    harness.settle()
    assert (number, "RESOURCE_EXHAUSTED") in [each[:2] for each in harness.host.refusals]


def test_tenant_without_budget_is_refused_and_others_are_not() -> None:
    limits = budget(4, tenant_limits={"ann": MODEL_MIB * MIB - 1})
    harness = LifecycleHarness(limits, a="on_demand")
    number = harness.submit("a", ANN)
    harness.settle()
    text = f"a needs {MODEL_MIB} MiB, but max_model_bytes of this tenant is {MODEL_MIB} MiB"
    assert harness.host.refusals == [(number, "RESOURCE_EXHAUSTED", text)]
    with pytest.raises(ResourceExhausted, match="max_model_bytes of this tenant"):
        harness.submit("a", ANN)
    harness.serve("a", BOB)
    assert harness["a"].loading.owner == "bob"


def test_memory_is_charged_to_the_tenant_that_loaded_the_model() -> None:
    harness = LifecycleHarness(a="on_demand", b="start")
    harness.serve("a", ANN)
    harness.settle()
    harness.charged.clear()
    harness.now += 2.0
    harness.settle()
    assert harness.charged == {"ann": 2.0 * MODEL_MIB * MIB, "": 2.0 * MODEL_MIB * MIB}


def test_tenant_that_uses_most_makes_room_first() -> None:
    harness = LifecycleHarness(budget(3), a="on_demand", b="on_demand", c="on_demand", d="on_demand")
    for name, tenant in (("c", BOB), ("a", ANN), ("b", ANN)):
        harness.serve(name, tenant)
    harness.serve("d", ANN)
    assert harness.loaded == {"b", "c", "d"}


def test_unload_answers_accepted_requests_and_refuses_others() -> None:
    harness = LifecycleHarness(a="on_demand")
    number = harness.submit("a")
    harness.settle()
    harness.lifecycle.unload(harness["a"], harness.done.append)
    harness.settle()
    with pytest.raises(Unavailable, match="a is being unloaded"):
        harness.submit("a")
    assert (harness.loaded, harness.done) == ({"a"}, [])
    harness.answer("a", number)
    harness.settle()
    assert (harness.processes["a"], harness.done) == (0, [None])
    requested = len(harness.host.requested_snapshots)
    harness.serve("a")
    assert len(harness.host.requested_snapshots) == requested + 1, "the files were not read again"


def test_eviction_keeps_the_snapshot() -> None:
    harness = LifecycleHarness(budget(1), a="on_demand", b="on_demand")
    for name in ("a", "b", "a"):
        harness.serve(name)
    assert len(harness.host.requested_snapshots) == 2


def test_unload_after_the_drain_timeout_fails_requests() -> None:
    harness = LifecycleHarness(LifecycleLimits(drain_timeout_s=5.0, max_loading=8), a="manual")
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    harness.settle()
    for _ in range(3):
        harness.submit("a")
    harness.lifecycle.unload(harness["a"], harness.done.append)
    harness.settle()
    assert harness.done == [None]
    harness.now += 5.0
    harness.settle()
    assert harness.loaded == set()
    assert {code for _, code, _ in harness.host.refusals} == {"FAILED_PRECONDITION"}


def test_load_queue_is_bounded_in_all_and_per_tenant() -> None:
    names = {f"m{number}": "on_demand" for number in range(8)}
    harness = LifecycleHarness(LifecycleLimits(max_load_queue=4, max_loading=0), **names)
    harness.submit("m0")  # its files are being read
    for name in ("m1", "m2"):
        harness.submit(name, ANN)
    with pytest.raises(ResourceExhausted, match="2 models wait for memory") as caught:
        harness.submit("m3", ANN)
    assert caught.value.retry_after is not None
    for name in ("m3", "m4"):
        harness.submit(name, BOB)
    with pytest.raises(ResourceExhausted, match="4 models wait for memory"):
        harness.submit("m5", Tenant("carl", TenantConfig()))
    harness.submit("m1", BOB)  # it waits already


def test_queued_models_load_in_turn() -> None:
    harness = LifecycleHarness(LifecycleLimits(max_loading=1), **{f"m{number}": "on_demand" for number in range(5)})
    for number in range(5):
        harness.submit(f"m{number}")
    assert len(harness.host.requested_snapshots) == 2
    harness.settle()
    assert len(harness.loaded) == 5


def test_model_is_not_loaded_for_requests_that_have_ended() -> None:
    harness = LifecycleHarness(budget(1), a="on_demand", b="on_demand")
    harness.submit("a", deadline_s=1000.0)
    harness.settle()
    number = harness.submit("b", deadline_s=1.0)
    harness.settle()
    harness.now += 2.0
    harness.settle()
    assert harness["b"].readiness.state_name == "unloaded"
    assert (number, "DEADLINE_EXCEEDED") in harness.host.refused()


def test_lowered_budget_unloads_the_least_recently_used() -> None:
    harness = LifecycleHarness(budget(3), a="on_demand", b="on_demand", c="on_demand")
    for name in ("a", "b", "c", "a"):
        harness.serve(name)
    harness.lifecycle.configure(budget(2))
    harness.settle()
    assert harness.loaded == {"a", "c"}


def test_model_that_takes_more_than_reserved_makes_room_or_leaves() -> None:
    harness = LifecycleHarness(budget(2), a="on_demand", b="on_demand")
    harness.serve("a")
    harness.serve("b")
    harness.measured["b"] = (MODEL_MIB + 1) * MIB
    harness.now += 2.0
    harness.settle()
    assert harness.loaded == {"b"}
    assert harness.lifecycle.reservations.reserved_bytes(HOST) == (MODEL_MIB + 1) * MIB
    harness.measured["b"] = 3 * MODEL_MIB * MIB
    harness.now += 61.0
    harness["b"].loading.last_used_at = harness.now
    harness.settle()
    assert harness.loaded == set()


def test_load_of_a_failed_model_reports_the_cause() -> None:
    harness = LifecycleHarness(a="manual")
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    source = harness.host.requested_snapshots[-1]
    harness["a"].on_snapshot_failed(source, "not an ONNX file", harness.now)
    harness.settle()
    [error] = harness.done
    assert isinstance(error, FailedPrecondition)
    assert str(error) == "a failed: not an ONNX file"
    harness.lifecycle.load(harness["a"], "", harness.done.append)
    harness.settle()
    assert (harness.loaded, harness.done[1]) == ({"a"}, None)


def test_changed_configuration_of_an_unloaded_model_needs_no_load() -> None:
    harness = LifecycleHarness(a="on_demand")
    configs = {"a": ModelConfig("/models/other.onnx", "onnxruntime", workers=1, start="spawn", load="on_demand")}
    harness.registry.apply(harness.registry.compare(configs), configs, harness.now)
    harness.settle()
    assert (harness.loaded, harness["a"].config, harness.registry.changing) == (set(), configs["a"], [])
    harness.serve("a")


def test_models_that_stay_loaded_cannot_be_unloaded() -> None:
    harness = LifecycleHarness(a="start")
    harness["a"].config = ModelConfig("/models/a.onnx", "onnxruntime", required=True)
    with pytest.raises(FailedPrecondition, match="required = true"):
        harness.lifecycle.unload(harness["a"], harness.done.append)


def test_model_waits_for_memory_while_a_metadata_request_waits() -> None:
    harness = LifecycleHarness(budget(1), a="on_demand", b="on_demand")
    number = harness.submit("a")
    harness.settle()
    harness["b"].loading.load_on_demand("ann")
    harness["b"].dispatcher.metadata.request(MetadataRequest(b"client", "id"))
    harness.settle()
    assert harness["b"].readiness.state_name == "snapshotting"
    harness.answer("a", number)
    harness.settle()
    assert [client for client, _ in harness.host.metadata] == [b"client"]


def test_memory_that_is_freed_belongs_to_the_model_it_is_freed_for() -> None:
    models = {name: Residence(is_pinned=False, owner=name) for name in ("old", "big", "small")}
    table = ResidencyTable(Budgets({HOST: 10}, max_loading=3), models.__getitem__)
    table.request("old.1", "old", {HOST: 6})
    assert table.plan(0.0) == [Grant("old.1")]
    table.on_loaded("old.1", 0.0)
    table.request("big.1", "big", {HOST: 8})
    table.request("small.1", "small", {HOST: 3})
    assert table.plan(1.0) == [Unload("old", "its memory is needed for big")]
    table.on_release("old.1")
    table.on_ended("old.1", 2.0)
    assert table.plan(2.0) == [Grant("big.1")]


def update(harness: LifecycleHarness, name: str) -> None:
    harness[name].update(
        b"operator", "u", harness.now, path="/models/new.onnx", weights="", rollback=False, grant=OPERATOR
    )


def take_update_snapshot(harness: LifecycleHarness, name: str) -> None:
    source = harness.host.requested_snapshots[-1]
    snapshot = Snapshot(f"/snapshots/{source.number}", "", SHA, FILE_BYTES)
    harness[name].on_snapshot_taken(source, snapshot, harness.now)
    harness.settle()


def test_update_beyond_the_tenants_budget_fails_and_the_model_serves_on() -> None:
    limits = budget(4, tenant_limits={"ann": MODEL_MIB * MIB})
    harness = LifecycleHarness(limits, a="on_demand")
    harness.serve("a", ANN)
    update(harness, "a")
    take_update_snapshot(harness, "a")
    [(_, code, text)] = harness.host.errors
    assert code == "FAILED_PRECONDITION"
    assert f"beside the serving version, but max_model_bytes of tenant ann is {MODEL_MIB} MiB" in text
    harness.serve("a", ANN)


def test_no_update_begins_while_a_model_is_being_unloaded() -> None:
    harness = LifecycleHarness(a="on_demand")
    number = harness.submit("a")
    harness.settle()
    harness.lifecycle.unload(harness["a"], harness.done.append)
    with pytest.raises(Unavailable, match="a is being unloaded"):
        update(harness, "a")
    harness.answer("a", number)
    harness.settle()
    assert harness.done == [None]
    with pytest.raises(FailedPrecondition, match="a is not loaded"):
        update(harness, "a")


def test_unload_includes_what_a_reload_loads_meanwhile() -> None:
    harness = LifecycleHarness(a="on_demand")
    number = harness.submit("a")
    harness.settle()
    harness.lifecycle.unload(harness["a"], harness.done.append)
    configs = {"a": ModelConfig("/models/other.onnx", "onnxruntime", workers=1, start="spawn", load="on_demand")}
    harness.registry.apply(harness.registry.compare(configs), configs, harness.now)
    harness.lifecycle.tick(harness.now + 100.0)
    assert harness.done == []
    harness.answer("a", number)
    successor = harness["a"].successor
    assert successor is not None
    for _ in range(3):
        harness.settle()
        harness.advance(successor)
    assert (harness["a"].config, harness.loaded, harness.done) == (configs["a"], set(), [None])


def test_commands_that_wait_for_a_load_are_bounded() -> None:
    harness = LifecycleHarness(a="manual")
    for _ in range(64):
        harness.lifecycle.load(harness["a"], "", harness.done.append)
    with pytest.raises(ResourceExhausted, match="64 commands wait for the load of a"):
        harness.lifecycle.load(harness["a"], "", harness.done.append)
    harness.settle()
    assert harness.done == [None] * 64
