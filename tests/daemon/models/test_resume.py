"""Tests of models across a restart of the daemon: their records, and the models resumed from them."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from testkit.model_factory import model_factory
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.errors import FailedPrecondition, InvalidArgument, Unavailable
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription
from weightd_protocol.messages.worker import Hello, Predict, PredictResult, Reconnected, Stop
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, BAD, BUILT, CPU, GOOD, OUT, SEAL, SHA, FakeHost, request

ONE = ModelConfig(path="/models/one.onnx", engine="onnxruntime", workers=2, start="spawn")
TWO = dataclasses.replace(ONE, path="/models/two.onnx")


class DaemonHarness:
    """Model registry on a fake host; `restarted` returns the next one on the same host."""

    def __init__(self, host: FakeHost | None = None, now: float = 1000.0) -> None:
        self.host = host or FakeHost()
        self.now = now
        self.devices = {name: DeviceBudget(name) for name in ("cpu", "ascend:0", "ascend:1")}
        self.registry = ModelRegistry(model_factory(self.devices, self.host, self.host).make)

    def started(self, **configs: ModelConfig) -> DaemonHarness:
        self.registry.start(configs, self.now)
        return self.loaded(*configs)

    def loaded(self, *names: str) -> DaemonHarness:
        """Complete the snapshots and loads of these models."""
        for model in [model for model in self.registry.all_models() if model.name in names]:
            for source in self.host.requested_snapshots:
                model.on_snapshot_taken(source, Snapshot(f"/snapshots/{source.number}", "", SHA, 100), self.now)
            for generation_ in [each.loading for each in model.deployments if each.loading is not None]:
                holder, *workers = list(generation_.children)
                for name in (holder, *workers):
                    model.deployments.process_events.on_message(
                        name, Hello(name, SHA, {"weightd": VERSION}, CPU), [], self.now
                    )
                model.deployments.process_events.on_message(holder, BUILT, [], self.now)
                for name in workers:
                    model.deployments.process_events.on_message(name, ATTACHED, [], self.now)
        return self.reconcile()

    def reconcile(self) -> DaemonHarness:
        self.registry.reconcile(self.now)
        return self

    def reconnect(self, name: str = "m") -> DaemonHarness:
        """Reconnect the workers of the previous daemon."""
        model = self.registry.models[name]
        for child in [child for generation in model.generations for child in generation.children]:
            model.deployments.process_events.on_message(child, Reconnected(), [], self.now)
        return self.reconcile()

    def reload(self, **configs: ModelConfig) -> DaemonHarness:
        self.registry.apply(self.registry.compare(configs), configs, self.now)
        return self

    def records(self) -> list[ModelRecord]:
        return [decode(ModelRecord, json.loads(json.dumps(plain(each)))) for each in self.registry.records()]

    def restarted(self, **configs: ModelConfig) -> DaemonHarness:
        return self.resumed(self.records(), **configs)

    def resumed(self, records: list[ModelRecord], **configs: ModelConfig) -> DaemonHarness:
        """Return the next daemon."""
        self.host.requested_snapshots.clear()
        self.host.spawned.clear()
        following = DaemonHarness(self.host, self.now + 1000.0)
        following.registry.resume(records, configs, following.now)
        return following

    def generation(self, name: str = "m") -> GenerationBase:
        return self.registry.models[name].readiness.main_generation

    def update(self, *, rollback: bool = False) -> DaemonHarness:
        path = "" if rollback else "/models/new.onnx"
        self.registry.models["m"].update(
            b"operator", "u", self.now, path=path, weights="", rollback=rollback, grant=OPERATOR
        )
        return self


def test_model_is_resumed_without_loading() -> None:
    first = DaemonHarness().started(m=ONE)
    daemon = first.restarted(m=ONE)
    host, model = daemon.host, daemon.registry.models["m"]
    assert (host.requested_snapshots, host.spawned, host.resumed) == ([], [], ["m.1"])
    assert daemon.devices["cpu"].reserved == first.devices["cpu"].reserved != {}
    assert not model.readiness.is_serving
    # The signature is known before a worker reconnects.
    with pytest.raises(InvalidArgument, match="x is missing"):
        model.dispatcher.infer(request(BAD), daemon.now)
    with pytest.raises(Unavailable, match="m is loading on cpu"):
        daemon.update()
    submitted = request()
    model.dispatcher.infer(submitted, daemon.now)
    daemon.reconnect()
    assert (model.readiness.is_serving, model.readiness.is_complete, model.readiness.unready_reason(daemon.now)) == (
        True,
        True,
        "",
    )
    assert host.orders_of(Predict) == [("m.1.w1", Predict(submitted.number, RequestDescription("digits", (GOOD,))))]
    model.deployments.process_events.on_message(
        "m.1.w1", PredictResult(submitted.number, ResponseDescription("m", (OUT,))), [], daemon.now
    )
    assert host.answers == [submitted.number]


def test_private_weights_stay_private() -> None:
    daemon = DaemonHarness().started(m=ONE)
    [record] = daemon.records()
    private = dataclasses.replace(record, generations=(dataclasses.replace(record.generations[0], is_sharing=False),))
    following = daemon.resumed([private], m=ONE)
    [deployment] = following.registry.models["m"].deployments
    assert (following.generation().spec.is_sharing, deployment.spec.is_sharing) == (False, False)


def test_model_that_cannot_be_resumed_is_loaded_again() -> None:
    daemon = DaemonHarness().started(m=ONE).restarted(m=ONE)
    model = daemon.registry.models["m"]
    while daemon.generation().state is GenerationState.RESUMING:
        daemon.now += 60.0
        model.tick(daemon.now)
        for name in [name for name in daemon.generation().children if ".w" in name]:
            model.deployments.process_events.on_exit(name, ExitCause(1), daemon.now)
    assert not model.readiness.has_failed
    daemon.now += 60.0
    model.tick(daemon.now)
    assert "m.2.holder" in daemon.host.spawned


def test_loading_model_is_loaded_again() -> None:
    daemon = DaemonHarness()
    daemon.registry.start({"m": ONE}, daemon.now)
    assert daemon.records() == []
    assert [source.path for source in daemon.restarted(m=ONE).host.requested_snapshots] == ["/models/one.onnx"]


def test_changed_page_store_is_not_resumed(caplog: pytest.LogCaptureFixture) -> None:
    daemon = DaemonHarness().started(m=ONE)
    records = daemon.records()
    daemon.host.seals["m.1"] = SealRecord(SEAL.size, SEAL.mtime_ns + 1)
    with caplog.at_level(logging.ERROR, "weightd"):
        following = daemon.resumed(records, m=ONE)
    assert caplog.messages == ["m.1: loading again: the page store was changed while no daemon was running"]
    # The snapshot is still valid; the generation number is not reused.
    assert (following.host.requested_snapshots, following.host.spawned) == ([], ["m.2.holder", "m.2.w1", "m.2.w2"])
    model = following.registry.models["m"]
    model.deployments.process_events.on_message("m.1.w1", Reconnected(), [], following.now)
    assert not model.readiness.is_serving
    following.loaded("m")
    assert (following.generation().label, model.readiness.is_complete) == ("m.2", True)


def test_rollback_after_restart_uses_snapshot() -> None:
    daemon = DaemonHarness().started(m=ONE).update().loaded("m").restarted(m=ONE).reconnect()
    assert daemon.generation().source == ModelSource("/models/new.onnx", number=2)
    daemon.update(rollback=True)
    assert daemon.host.requested_snapshots == []
    daemon.loaded("m")
    assert [each.generations for each in daemon.host.updated] == [(2,), (3,)]
    assert daemon.generation().source == ModelSource("/models/one.onnx", number=1)
    [record] = daemon.records()
    assert (record.source, record.previous, [each.number for each in record.sources]) == (1, 0, [1])
    with pytest.raises(FailedPrecondition, match=r"m serves /models/one\.onnx, and no earlier version is kept"):
        daemon.restarted(m=ONE).reconnect().update(rollback=True)


def test_pending_update_is_forgotten() -> None:
    daemon = DaemonHarness().started(m=ONE).update().restarted(m=ONE).reconnect()
    assert (daemon.generation().source.path, daemon.registry.models["m"].is_updating) == ("/models/one.onnx", False)
    daemon.update()
    # The snapshot of the first update may be incomplete, so its number is not reused.
    assert daemon.host.requested_snapshots[-1].number > 2
    assert daemon.loaded("m").generation().label == "m.3"


def test_devices_without_record_are_loaded() -> None:
    both = dataclasses.replace(ONE, devices=("ascend:0", "ascend:1"))
    daemon = DaemonHarness().started(m=both)
    [*daemon.registry.models["m"].deployments][1].drain(daemon.now)
    [record] = daemon.records()
    assert [each.device for each in record.generations] == ["ascend:0"]
    following = daemon.restarted(m=both).reconnect()
    assert following.registry.models["m"].readiness.is_serving
    assert following.host.spawned == ["m.3.holder", "m.3.w1", "m.3.w2"]


def test_hand_over_rejects_running_requests() -> None:
    daemon = DaemonHarness().started(m=ONE)
    submitted = request()
    daemon.registry.models["m"].dispatcher.infer(submitted, daemon.now)
    daemon.registry.hand_over(daemon.now)
    assert daemon.host.refusals == [(submitted.number, "UNAVAILABLE", "weightd is restarting")]
    assert [each.name for each in daemon.records()] == ["m"]


# --- configuration changes during a restart -------------------------------------------------------------------------


def test_restarted_daemon_applies_new_configuration() -> None:
    daemon = DaemonHarness().started(stays=ONE, changes=ONE, removed=ONE).restarted(added=TWO, changes=TWO, stays=ONE)
    models = daemon.registry.models
    assert list(models) == ["added", "changes", "stays"]
    assert sorted(daemon.host.resumed) == ["changes.1", "removed.1", "stays.1"]
    assert daemon.devices["cpu"].leaving == {"removed.1"}
    assert [source.path for source in daemon.host.requested_snapshots] == ["/models/two.onnx"] * 2
    # The changed model loads even before the workers of the old one have reconnected.
    assert not daemon.reconcile().registry.models["changes"].readiness.is_serving
    daemon.reconnect("stays").reconnect("changes")
    assert (models["stays"].readiness.is_serving, models["changes"].readiness.is_serving, models["changes"].config) == (
        True,
        True,
        ONE,
    )
    daemon.loaded("changes", "added")
    assert (models["added"].readiness.is_serving, models["changes"].config) == (True, TWO)
    assert daemon.generation("changes").label == "changes.2"
    # The removed model first finishes its requests, then all its processes stop.
    [leaving] = [model for model in daemon.registry.all_models() if model.name == "removed"]
    assert [name for name, _ in daemon.host.orders_of(Stop) if name.startswith("removed")] == [
        "removed.1.w1",
        "removed.1.w2",
    ]
    for name in ("removed.1.w1", "removed.1.w2", "removed.1.holder"):
        leaving.deployments.process_events.on_exit(name, ExitCause(0), daemon.now)
    assert leaving not in daemon.reconcile().registry.all_models()
    assert [source.path for source in daemon.host.removed_snapshots] == ["/models/one.onnx"]


def test_changed_model_replaces_one_that_does_not_reconnect() -> None:
    daemon = DaemonHarness().started(m=ONE).restarted(m=TWO).reconcile()
    old = daemon.registry.models["m"]
    assert old.config == ONE
    for name in ("m.1.w1", "m.1.w2"):
        old.deployments.process_events.on_exit(name, ExitCause(None, "exited while no daemon was running"), daemon.now)
    assert daemon.reconcile().registry.models["m"].config == TWO


def test_only_serving_models_that_stay_are_recorded() -> None:
    daemon = DaemonHarness().started(m=ONE, removed=ONE).reload(m=TWO)
    [record] = daemon.records()
    assert (record.name, record.config, record.generations[0].number, record.last_ids) == ("m", ONE, 1, (2, 2))
    daemon = daemon.restarted(m=TWO).reconnect()
    assert daemon.registry.models["m"].readiness.is_serving
    daemon.loaded("m")
    assert (daemon.generation().label, daemon.registry.models["m"].config) == ("m.3", TWO)
