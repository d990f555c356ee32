"""What a daemon writes down of its models, and what the next one makes of it."""

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


class Daemon:
    """A registry over a host; `restarted` is the next one on the same host."""

    def __init__(self, host: FakeHost | None = None, now: float = 1000.0) -> None:
        self.host = host or FakeHost()
        self.now = now
        self.devices = {name: DeviceBudget(name) for name in ("cpu", "ascend:0", "ascend:1")}
        self.fleet = ModelRegistry(model_factory(self.devices, self.host, self.host).make)

    def started(self, **configs: ModelConfig) -> Daemon:
        self.fleet.start(configs, self.now)
        return self.loaded(*configs)

    def loaded(self, *names: str) -> Daemon:
        """Everything that loads for these names has what it needs."""
        for model in [model for model in self.fleet.all_models() if model.name in names]:
            for source in self.host.pinned:
                model.on_snapshot_taken(source, Snapshot(f"/snapshots/{source.number}", "", SHA, 100), self.now)
            for coming in [each.loading for each in model.deployments if each.loading is not None]:
                holder, *workers = list(coming.children)
                for name in (holder, *workers):
                    model.deployments.process_events.on_message(
                        name, Hello(name, SHA, {"weightd": VERSION}, CPU), [], self.now
                    )
                model.deployments.process_events.on_message(holder, BUILT, [], self.now)
                for name in workers:
                    model.deployments.process_events.on_message(name, ATTACHED, [], self.now)
        return self.settled()

    def settled(self) -> Daemon:
        self.fleet.reconcile(self.now)
        return self

    def backs(self, name: str = "m") -> Daemon:
        """The workers of the daemon before this one are back."""
        model = self.fleet.models[name]
        for child in [child for generation in model.generations for child in generation.children]:
            model.deployments.process_events.on_message(child, Reconnected(), [], self.now)
        return self.settled()

    def reload(self, **configs: ModelConfig) -> Daemon:
        self.fleet.apply(self.fleet.compare(configs), configs, self.now)
        return self

    def records(self) -> list[ModelRecord]:
        return [decode(ModelRecord, json.loads(json.dumps(plain(each)))) for each in self.fleet.records()]

    def restarted(self, **configs: ModelConfig) -> Daemon:
        return self.resumed(self.records(), **configs)

    def resumed(self, records: list[ModelRecord], **configs: ModelConfig) -> Daemon:
        """Return the daemon that follows this one."""
        self.host.pinned.clear()
        self.host.spawned.clear()
        following = Daemon(self.host, self.now + 1000.0)
        following.fleet.resume(records, configs, following.now)
        return following

    def generation(self, name: str = "m") -> GenerationBase:
        return self.fleet.models[name].readiness.main_generation

    def update(self, *, rollback: bool = False) -> Daemon:
        path = "" if rollback else "/models/new.onnx"
        self.fleet.models["m"].update(
            b"operator", "u", self.now, path=path, weights="", rollback=rollback, grant=OPERATOR
        )
        return self


def test_a_model_goes_on_without_loading_anything() -> None:
    first = Daemon().started(m=ONE)
    daemon = first.restarted(m=ONE)
    host, model = daemon.host, daemon.fleet.models["m"]
    assert (host.pinned, host.spawned, host.resumed) == ([], [], ["m.1"])
    assert daemon.devices["cpu"].reserved == first.devices["cpu"].reserved != {}
    assert not model.readiness.is_serving
    # What it takes is known before anybody is back.
    with pytest.raises(InvalidArgument, match="x is missing"):
        model.dispatcher.infer(request(BAD), daemon.now)
    with pytest.raises(Unavailable, match="m is loading on cpu"):
        daemon.update()
    asked = request()
    model.dispatcher.infer(asked, daemon.now)
    daemon.backs()
    assert (model.readiness.is_serving, model.readiness.is_complete, model.readiness.unready_reason(daemon.now)) == (
        True,
        True,
        "",
    )
    assert host.told(Predict) == [("m.1.w1", Predict(asked.number, RequestDescription("digits", (GOOD,))))]
    model.deployments.process_events.on_message(
        "m.1.w1", PredictResult(asked.number, ResponseDescription("m", (OUT,))), [], daemon.now
    )
    assert host.answers == [asked.number]


def test_one_that_shares_nothing_still_does_not() -> None:
    daemon = Daemon().started(m=ONE)
    [record] = daemon.records()
    private = dataclasses.replace(record, generations=(dataclasses.replace(record.generations[0], is_sharing=False),))
    following = daemon.resumed([private], m=ONE)
    [deployment] = following.fleet.models["m"].deployments
    assert (following.generation().spec.is_sharing, deployment.spec.is_sharing) == (False, False)


def test_one_that_served_before_is_loaded_anew_if_it_cannot_go_on() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    model = daemon.fleet.models["m"]
    while daemon.generation().state is GenerationState.RESUMING:
        daemon.now += 60.0
        model.tick(daemon.now)
        for name in [name for name in daemon.generation().children if ".w" in name]:
            model.deployments.process_events.on_exit(name, ExitCause(1), daemon.now)
    assert not model.readiness.has_failed
    daemon.now += 60.0
    model.tick(daemon.now)
    assert "m.2.holder" in daemon.host.spawned


def test_a_model_that_loads_is_loaded_anew() -> None:
    daemon = Daemon()
    daemon.fleet.start({"m": ONE}, daemon.now)
    assert daemon.records() == []
    assert [source.path for source in daemon.restarted(m=ONE).host.pinned] == ["/models/one.onnx"]


def test_a_page_store_that_was_changed_meanwhile_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon().started(m=ONE)
    records = daemon.records()
    daemon.host.seals["m.1"] = SealRecord(SEAL.size, SEAL.mtime_ns + 1)
    with caplog.at_level(logging.ERROR, "weightd"):
        following = daemon.resumed(records, m=ONE)
    assert caplog.messages == ["m.1: loading again: the page store was changed while no daemon was running"]
    # The snapshot is still good; the number is not used again.
    assert (following.host.pinned, following.host.spawned) == ([], ["m.2.holder", "m.2.w1", "m.2.w2"])
    model = following.fleet.models["m"]
    model.deployments.process_events.on_message("m.1.w1", Reconnected(), [], following.now)
    assert not model.readiness.is_serving
    following.loaded("m")
    assert (following.generation().label, model.readiness.is_complete) == ("m.2", True)


def test_a_rollback_needs_no_file_after_a_restart_either() -> None:
    daemon = Daemon().started(m=ONE).update().loaded("m").restarted(m=ONE).backs()
    assert daemon.generation().source == ModelSource("/models/new.onnx", number=2)
    daemon.update(rollback=True)
    assert daemon.host.pinned == []
    daemon.loaded("m")
    assert [each.generations for each in daemon.host.updated] == [(2,), (3,)]
    assert daemon.generation().source == ModelSource("/models/one.onnx", number=1)
    [record] = daemon.records()
    assert (record.source, record.previous, [each.number for each in record.sources]) == (1, 0, [1])
    with pytest.raises(FailedPrecondition, match=r"m serves /models/one\.onnx, and no earlier version is kept"):
        daemon.restarted(m=ONE).backs().update(rollback=True)


def test_an_update_under_way_is_forgotten() -> None:
    daemon = Daemon().started(m=ONE).update().restarted(m=ONE).backs()
    assert (daemon.generation().source.path, daemon.fleet.models["m"].is_updating) == ("/models/one.onnx", False)
    daemon.update()
    # What the first one was to load may be there in part.
    assert daemon.host.pinned[-1].number > 2
    assert daemon.loaded("m").generation().label == "m.3"


def test_devices_of_which_nothing_was_left_are_loaded() -> None:
    both = dataclasses.replace(ONE, devices=("ascend:0", "ascend:1"))
    daemon = Daemon().started(m=both)
    [*daemon.fleet.models["m"].deployments][1].drain(daemon.now)
    [record] = daemon.records()
    assert [each.device for each in record.generations] == ["ascend:0"]
    following = daemon.restarted(m=both).backs()
    assert following.fleet.models["m"].readiness.is_serving
    assert following.host.spawned == ["m.3.holder", "m.3.w1", "m.3.w2"]


def test_a_daemon_that_ends_answers_everybody() -> None:
    daemon = Daemon().started(m=ONE)
    asked = request()
    daemon.fleet.models["m"].dispatcher.infer(asked, daemon.now)
    daemon.fleet.hand_over(daemon.now)
    assert daemon.host.refusals == [(asked.number, "UNAVAILABLE", "weightd is restarting")]
    assert [each.name for each in daemon.records()] == ["m"]


# --- a registry
# --------------------------------------------------------------------------------------------------------


def test_models_go_on_as_the_configuration_says_now() -> None:
    daemon = Daemon().started(stays=ONE, changes=ONE, goes=ONE).restarted(comes=TWO, changes=TWO, stays=ONE)
    models = daemon.fleet.models
    assert list(models) == ["comes", "changes", "stays"]
    assert sorted(daemon.host.resumed) == ["changes.1", "goes.1", "stays.1"]
    assert daemon.devices["cpu"].leaving == {"goes.1"}
    assert [source.path for source in daemon.host.pinned] == ["/models/two.onnx"] * 2
    # What has changed loads beside what serves, even before that is back.
    assert not daemon.settled().fleet.models["changes"].readiness.is_serving
    daemon.backs("stays").backs("changes")
    assert (models["stays"].readiness.is_serving, models["changes"].readiness.is_serving, models["changes"].config) == (
        True,
        True,
        ONE,
    )
    daemon.loaded("changes", "comes")
    assert (models["comes"].readiness.is_serving, models["changes"].config) == (True, TWO)
    assert daemon.generation("changes").label == "changes.2"
    # What is removed leaves with all of its processes, after it has answered what it had.
    [leaving] = [model for model in daemon.fleet.all_models() if model.name == "goes"]
    assert [name for name, _ in daemon.host.told(Stop) if name.startswith("goes")] == ["goes.1.w1", "goes.1.w2"]
    for name in ("goes.1.w1", "goes.1.w2", "goes.1.holder"):
        leaving.deployments.process_events.on_exit(name, ExitCause(0), daemon.now)
    assert leaving not in daemon.settled().fleet.all_models()
    assert [source.path for source in daemon.host.unpinned] == ["/models/one.onnx"]


def test_a_changed_model_that_is_not_back_in_time_makes_way() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=TWO).settled()
    old = daemon.fleet.models["m"]
    assert old.config == ONE
    for name in ("m.1.w1", "m.1.w2"):
        old.deployments.process_events.on_exit(name, ExitCause(None, "exited while no daemon was running"), daemon.now)
    assert daemon.settled().fleet.models["m"].config == TWO


def test_what_is_written_down_is_what_serves_and_stays() -> None:
    daemon = Daemon().started(m=ONE, goes=ONE).reload(m=TWO)
    [record] = daemon.records()
    assert (record.name, record.config, record.generations[0].number, record.last_ids) == ("m", ONE, 1, (2, 2))
    daemon = daemon.restarted(m=TWO).backs()
    assert daemon.fleet.models["m"].readiness.is_serving
    daemon.loaded("m")
    assert (daemon.generation().label, daemon.fleet.models["m"].config) == ("m.3", TWO)
