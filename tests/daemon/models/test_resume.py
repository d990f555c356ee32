"""What a daemon writes down of its models, and what the next one makes of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from weightd.daemon.children.launch import Program
from weightd.daemon.children.owner import Owner, Snapshot
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.plan import Source
from weightd.daemon.generations.records import SealRecord
from weightd.daemon.generations.resume import BACK_TIMEOUT_S
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import End
from weightd.daemon.models.budget import Device
from weightd.daemon.models.fleet import Fleet
from weightd.daemon.models.model import Model
from weightd.daemon.models.records import ModelRecord
from weightd.daemon.models.sources import Numbers
from weightd.daemon.requests.request import Request
from weightd.protocol.errors import FailedPrecondition, InvalidArgument, RequestError, Unavailable
from weightd.protocol.messages.children import (
    Attached,
    Back,
    Built,
    ChildMessage,
    Hello,
    OrderMessage,
    Predict,
    Result,
    Stop,
    Traits,
)
from weightd.protocol.messages.control import ModelMetadataResponse, UpdateResponse
from weightd.protocol.messages.data import TensorSignature, TensorSpec
from weightd.protocol.schema import decode, plain
from weightd.protocol.version import VERSION

FOREVER = float("inf")
SHA = "5" * 64
X = TensorSignature("x", "FP32", (-1, 4))
SPEC = TensorSpec("x", "FP32", (1, 4))
BUILT = Built("/store", (X,), (X,), ({"x": (2,)},), "canary", 4096, "a note")
ATTACHED = Attached("canary", 4000, "another note")
CPU = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
CARD = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
SEAL = SealRecord(8192, 10**18)
PREDICT_TIMEOUT_S = 40.0
PATIENCE_S = BACK_TIMEOUT_S + PREDICT_TIMEOUT_S
HOLDER, W1, W2, W3 = "m.7.holder", "m.7.w1", "m.7.w2", "m.7.w3"

_pids = itertools.count(1000)


def hello(traits: Traits) -> Hello:
    return Hello(str(next(_pids)), SHA, {"weightd": VERSION}, traits)


# --- a model --------------------------------------------------------------------------------------------------------


class Host:
    """Children and clients of models, over daemons that come and go: the children stay."""

    def __init__(self) -> None:
        self.pinned: list[Source] = []
        self.unpinned: list[Source] = []
        self.roles: dict[str, Role] = {}
        self.spawned: list[str] = []
        self.seals: dict[str, SealRecord] = {}
        self.resumed: list[str] = []
        self.killed: list[str] = []
        self.orders: list[tuple[str, OrderMessage]] = []
        self.updated: list[Sequence[int]] = []
        self.errors: list[str] = []
        self.answers: list[int] = []
        self.changes = 0

    def pin(self, owner: Owner, model: str, config: ModelConfig, source: Source) -> None:
        self.pinned.append(source)

    def unpin(self, model: str, source: Source) -> None:
        self.unpinned.append(source)

    def spawn(self, owner: Owner, generation: Generation, program: Program, name: str, role: Role) -> None:
        assert name not in self.roles, "its name was used before"
        assert program.model == f"/snapshots/{generation.source.number}"
        self.roles[name] = role
        self.spawned.append(name)

    def resume(self, owner: Owner, generation: Generation, seal: SealRecord | None) -> bool:
        self.resumed.append(generation.label)
        return self.seal(generation) == seal

    def changed(self) -> None:
        self.changes += 1

    def seal(self, generation: Generation) -> SealRecord | None:
        return self.seals.get(generation.label)

    def exported(self, generation: Generation) -> None:
        self.seals[generation.label] = SEAL

    def lives(self, name: str) -> bool:
        return True

    def intact(self, generation: Generation) -> bool:
        return True

    def kill(self, name: str, *, abort: bool = False) -> None:
        self.killed.append(name)

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        self.orders.append((name, order))

    def forget(self, generation: Generation) -> None:
        self.seals.pop(generation.label, None)

    def answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        self.answers.append(request.number)

    def refuse(self, request: Request, error: RequestError) -> None:
        self.errors.append(str(error))

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        raise AssertionError("nobody asked")

    def tell_updated(self, client: bytes, response: UpdateResponse) -> None:
        self.updated.append([*response.generations])

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.errors.append(str(error))


class Daemon:
    """A fleet over a host; `restarted` is the next one on the same host."""

    def __init__(self, host: Host | None = None, now: float = 1000.0) -> None:
        self.host = host or Host()
        self.now = now
        self.devices = {name: Device(name) for name in ("cpu", "ascend:0", "ascend:1")}
        self.fleet = Fleet(self.make)

    def make(self, name: str, config: ModelConfig, numbers: Numbers) -> Model:
        return Model(name, config, self.devices, self.host, self.host, numbers)

    def started(self, **configs: ModelConfig) -> Daemon:
        self.fleet.start(configs, self.now)
        return self.loaded(*configs)

    def loaded(self, *names: str) -> Daemon:
        """Everything that loads for these names has what it needs."""
        for each in [model for model in self.fleet.everyone() if model.name in names]:
            for source in self.host.pinned:
                each.pinned(source, Snapshot(f"/snapshots/{source.number}", "", SHA, 100), self.now)
            for deployment in each.deployments:
                if deployment.coming is not None:
                    self.load(each, deployment.coming)
        self.fleet.settle(self.now)
        return self

    def load(self, model: Model, generation: Generation) -> None:
        children = list(generation.children.values())
        for child in children:
            self.says(model, child.name, hello(CPU))
        self.says(model, children[0].name, BUILT)
        for child in children[1:]:
            self.says(model, child.name, ATTACHED)

    def says(self, model: Model, child: str, message: ChildMessage) -> None:
        model.heard(child, message, [], self.now)

    def backs(self, name: str) -> Daemon:
        model = self.fleet.models[name]
        for generation in model.generations:
            for child in list(generation.children):
                self.says(model, child, Back())
        self.fleet.settle(self.now)
        return self

    def records(self) -> list[ModelRecord]:
        return [decode(ModelRecord, json.loads(json.dumps(plain(each)))) for each in self.fleet.records()]

    def restarted(self, **configs: ModelConfig) -> Daemon:
        records = self.records()
        self.host.pinned, self.host.spawned = [], []
        following = Daemon(self.host, self.now + 1000.0)
        following.fleet.resume(records, configs, following.now)
        return following

    def generation(self, name: str = "m") -> Generation:
        return self.fleet.models[name].main

    def update(self, *, rollback: bool = False) -> None:
        path = "" if rollback else "/models/new.onnx"
        self.fleet.models["m"].update(b"operator", "u", self.now, path=path, weights="", rollback=rollback)


ONE = ModelConfig(path="/models/one.onnx", engine="onnxruntime", workers=2, predict_timeout=PREDICT_TIMEOUT_S)
TWO = dataclasses.replace(ONE, path="/models/two.onnx")


def request(number: int, now: float) -> Request:
    return Request(number, b"client", f"id{number}", "m", (SPEC,), (b"bytes",), now, now + 60.0, 5)


def test_a_model_goes_on_without_loading_anything() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    host = daemon.host
    assert (host.pinned, host.spawned, host.resumed) == ([], [], ["m.1"])
    model = daemon.fleet.models["m"]
    assert not model.serves
    model.infer(request(1, daemon.now), daemon.now)
    daemon.backs("m")
    assert (model.serves, model.complete, model.unready(daemon.now)) == (True, True, "")
    [(worker, order)] = [each for each in host.orders if isinstance(each[1], Predict)]
    assert order == Predict(1, (SPEC,))
    daemon.says(model, worker, Result(1, (SPEC,)))
    assert host.answers == [1]


def test_what_it_takes_of_its_device_is_promised() -> None:
    daemon = Daemon().started(m=ONE)
    before = daemon.devices["cpu"].promised
    assert daemon.restarted(m=ONE).devices["cpu"].promised == before != {}


def test_one_that_shares_nothing_still_does_not() -> None:
    [record] = Daemon().started(m=ONE).records()
    private = dataclasses.replace(record, generations=(dataclasses.replace(record.generations[0], sharing=False),))
    following = Daemon()
    following.host.seals["m.1"] = SEAL
    following.fleet.resume([private], {"m": ONE}, following.now)
    [deployment] = following.fleet.models["m"].deployments
    assert (following.generation().terms.sharing, deployment.terms.sharing) == (False, False)


def test_one_that_served_before_is_loaded_anew_if_it_cannot_go_on() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    model = daemon.fleet.models["m"]
    while daemon.generation().state is GenerationState.RESUMING:
        daemon.now += 60.0
        model.tick(daemon.now)
        for name in [name for name in daemon.generation().children if ".w" in name]:
            model.exited(name, End(1), daemon.now)
    assert not model.has_failed
    daemon.now += 60.0
    model.tick(daemon.now)
    assert "m.2.holder" in daemon.host.spawned


def test_what_the_model_takes_is_known_before_anybody_is_back() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    wrong = dataclasses.replace(request(1, daemon.now), inputs=(TensorSpec("y", "FP32", (1, 4)),))
    with pytest.raises(InvalidArgument, match="x is missing"):
        daemon.fleet.models["m"].infer(wrong, daemon.now)


def test_a_model_that_loads_is_loaded_anew() -> None:
    daemon = Daemon()
    daemon.fleet.start({"m": ONE}, daemon.now)
    assert daemon.records() == []
    following = daemon.restarted(m=ONE)
    assert [source.path for source in following.host.pinned] == ["/models/one.onnx"]


def test_a_page_store_that_was_changed_meanwhile_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon().started(m=ONE)
    daemon.host.seals["m.1"] = SealRecord(8192, 10**18 + 1)
    records = daemon.records()
    daemon.host.seals["m.1"] = SEAL
    following = Daemon(daemon.host, daemon.now + 1000.0)
    daemon.host.spawned = []
    with caplog.at_level(logging.ERROR, "weightd"):
        following.fleet.resume(records, {"m": ONE}, following.now)
    assert [record.getMessage() for record in caplog.records] == [
        "m.1: loaded anew: the page store was changed while no daemon was there"
    ]
    # The snapshot is still good; the number is not used again.
    assert following.host.spawned == ["m.2.holder", "m.2.w1", "m.2.w2"]
    following.says(following.fleet.models["m"], "m.1.w1", Back())
    assert not following.fleet.models["m"].serves
    following.loaded("m")
    assert following.generation().label == "m.2"
    assert following.fleet.models["m"].complete


def test_numbers_are_never_used_again() -> None:
    daemon = Daemon().started(m=ONE)
    for number in (2, 3):
        daemon.update()
        daemon.loaded("m")
        assert daemon.host.updated[-1] == [number]
        daemon = daemon.restarted(m=ONE).backs("m")
        assert daemon.generation().label == f"m.{number}"
    sources = [source.number for source in daemon.host.unpinned]
    record = daemon.records()[0]
    assert record.made[0] == 3
    assert len({*sources, record.source, record.previous}) == 3
    assert record.made[1] >= max(*sources, record.source, record.previous)


def test_a_rollback_needs_no_file_after_a_restart_either() -> None:
    daemon = Daemon().started(m=ONE)
    with pytest.raises(FailedPrecondition, match="nothing to go back to"):
        daemon.update(rollback=True)
    daemon.update()
    daemon = daemon.loaded("m").restarted(m=ONE).backs("m")
    assert daemon.generation().source == Source("/models/new.onnx", number=2)
    daemon.update(rollback=True)
    assert daemon.host.pinned == []
    daemon.loaded("m")
    assert daemon.host.updated == [[2], [3]]
    assert daemon.generation().source == Source("/models/one.onnx", number=1)
    record = daemon.records()[0]
    assert (record.source, record.previous, [each.number for each in record.sources]) == (1, 0, [1])
    daemon = daemon.restarted(m=ONE).backs("m")
    with pytest.raises(FailedPrecondition, match=r"m serves /models/one\.onnx, and nothing before it is kept"):
        daemon.update(rollback=True)


def test_an_update_under_way_is_forgotten() -> None:
    daemon = Daemon().started(m=ONE)
    daemon.update()
    following = daemon.restarted(m=ONE).backs("m")
    assert (following.generation().source.path, following.fleet.models["m"].updating) == ("/models/one.onnx", False)
    following.update()
    # What the first one was to load may be there in part.
    assert following.host.pinned[-1].number > 2
    following.loaded("m")
    assert following.generation().label == "m.3"


def test_until_it_serves_it_cannot_be_updated() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    with pytest.raises(Unavailable, match="m is loading on cpu"):
        daemon.update()


def test_devices_of_which_nothing_was_left_are_loaded() -> None:
    both = dataclasses.replace(ONE, devices=("ascend:0", "ascend:1"))
    daemon = Daemon().started(m=both)
    daemon.fleet.models["m"].deployments[1].drain(daemon.now)
    [record] = daemon.records()
    assert [each.device for each in record.generations] == ["ascend:0"]
    following = daemon.restarted(m=both).backs("m")
    assert following.fleet.models["m"].serves
    assert following.host.spawned == ["m.3.holder", "m.3.w1", "m.3.w2"]


def test_who_ended_while_no_daemon_was_there_is_replaced() -> None:
    daemon = Daemon().started(m=ONE).restarted(m=ONE)
    model = daemon.fleet.models["m"]
    model.exited("m.1.w1", End(None, "it ended while no daemon was there"), daemon.now)
    daemon.backs("m")
    daemon.now += 1.0
    model.tick(daemon.now)
    assert daemon.host.spawned == ["m.1.w3"]


def test_a_daemon_that_ends_answers_everybody() -> None:
    daemon = Daemon().started(m=ONE)
    daemon.fleet.models["m"].infer(request(1, daemon.now), daemon.now)
    daemon.fleet.leave(daemon.now)
    assert daemon.host.errors == ["weightd is restarting"]
    assert [each.name for each in daemon.records()] == ["m"]


# --- a fleet --------------------------------------------------------------------------------------------------------


def test_models_go_on_as_the_configuration_says_now() -> None:
    daemon = Daemon().started(stays=ONE, changes=ONE, goes=ONE)
    following = daemon.restarted(comes=TWO, changes=TWO, stays=ONE)
    assert list(following.fleet.models) == ["comes", "changes", "stays"]
    assert sorted(following.host.resumed) == ["changes.1", "goes.1", "stays.1"]
    assert [source.path for source in following.host.pinned] == ["/models/two.onnx"] * 2
    for name in ("stays", "changes"):
        # What has changed loads beside what serves, even before that is back.
        following.fleet.settle(following.now)
        assert not following.fleet.models[name].serves
        following.backs(name)
        assert following.fleet.models[name].serves
    assert following.fleet.models["changes"].config == ONE
    following.loaded("changes", "comes")
    assert following.fleet.models["changes"].config == TWO
    assert following.generation("changes").label == "changes.2"
    assert following.fleet.models["comes"].serves


def test_a_changed_model_that_is_not_back_in_time_makes_way() -> None:
    following = Daemon().started(m=ONE).restarted(m=TWO)
    old = following.fleet.models["m"]
    following.fleet.settle(following.now)
    assert old.successor is not None
    for name in ("m.1.w1", "m.1.w2"):
        old.exited(name, End(None, "it ended while no daemon was there"), following.now)
    following.now += 0.05
    following.fleet.settle(following.now)
    assert following.fleet.models["m"].config == TWO


def test_a_model_that_is_removed_leaves_with_all_of_its_processes() -> None:
    daemon = Daemon().started(stays=ONE, goes=ONE).restarted(stays=ONE)
    [leaving] = [model for model in daemon.fleet.everyone() if model.name == "goes"]
    daemon.fleet.settle(daemon.now)
    stopped = [name for name, order in daemon.host.orders if order == Stop()]
    assert stopped == ["goes.1.w1", "goes.1.w2"]
    for name in ("goes.1.w1", "goes.1.w2", "goes.1.holder"):
        leaving.exited(name, End(0), daemon.now)
    daemon.fleet.settle(daemon.now)
    assert [model.name for model in daemon.fleet.everyone()] == ["stays"]
    assert [source.path for source in daemon.host.unpinned] == ["/models/one.onnx"]


def test_a_model_that_leaves_is_not_written_down() -> None:
    daemon = Daemon().started(stays=ONE, goes=ONE)
    daemon.fleet.apply(daemon.fleet.compare({"stays": ONE}), {"stays": ONE}, daemon.now)
    assert [each.name for each in daemon.records()] == ["stays"]


def test_of_a_model_that_changes_the_one_that_serves_is_written_down() -> None:
    daemon = Daemon().started(m=ONE)
    daemon.fleet.apply(daemon.fleet.compare({"m": TWO}), {"m": TWO}, daemon.now)
    [record] = daemon.records()
    assert (record.config, record.generations[0].number, record.made) == (ONE, 1, (2, 2))
    following = daemon.restarted(m=TWO).backs("m")
    assert following.fleet.models["m"].serves
    following.loaded("m")
    assert (following.generation().label, following.fleet.models["m"].config) == ("m.3", TWO)
