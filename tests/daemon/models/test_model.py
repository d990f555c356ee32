"""A model over a host that only writes down what it is asked for."""

from __future__ import annotations

import dataclasses
import itertools
import signal
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
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.host.ends import End
from weightd.daemon.models.budget import Device
from weightd.daemon.models.model import Model
from weightd.daemon.requests.request import Request
from weightd.protocol.errors import FailedPrecondition, InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd.protocol.messages.children import (
    Attach,
    Attached,
    Broken,
    Build,
    Built,
    ChildMessage,
    Failed,
    Hello,
    OrderMessage,
    Predict,
    Result,
    Stop,
    Traits,
)
from weightd.protocol.messages.control import ModelMetadataResponse, UpdateResponse
from weightd.protocol.messages.data import TensorSignature, TensorSpec
from weightd.protocol.version import VERSION

SHA = "5" * 64
SNAPSHOT = Snapshot("/snapshot/digits.onnx", "", SHA, 100)
CPU = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
X = TensorSignature("x", "FP32", (-1, 2))
Y = TensorSignature("y", "FP32", (-1, 3))
GOOD = TensorSpec("x", "FP32", (5, 2))
BAD = TensorSpec("z", "FP32", (5, 2))
OUT = TensorSpec("y", "FP32", (5, 3))
HOLDER, W1, W2 = "digits.1.holder", "digits.1.w1", "digits.1.w2"

_numbers = itertools.count(1)


def request(spec: TensorSpec = GOOD, deadline: float = 1e9, arrived: float = 0.0) -> Request:
    number = next(_numbers)
    return Request(number, b"client", f"id{number}", "digits", (spec,), (b"bytes",), arrived, deadline, 5)


class FakeHost:
    def __init__(self) -> None:
        self.pinned = 0
        self.sources: list[Source] = []
        self.unpinned: list[Source] = []
        self.dead: set[str] = set()
        self.forgotten: list[str] = []
        self.updated: list[tuple[bytes, UpdateResponse]] = []
        self.spawned: list[tuple[str, Role]] = []
        self.killed: list[str] = []
        self.aborted: list[str] = []
        self.sealed: set[str] = set()
        self.damaged: set[str] = set()
        self.resumed: list[tuple[str, SealRecord | None]] = []
        self.changes = 0
        self.orders: list[tuple[str, OrderMessage]] = []
        self.frames: list[Sequence[Any]] = []
        self.answers: list[tuple[int, Sequence[TensorSpec], Sequence[Any]]] = []
        self.refusals: list[tuple[int, RequestError]] = []
        self.metadata: list[tuple[bytes, ModelMetadataResponse]] = []
        self.errors: list[tuple[bytes, str, str]] = []
        self.codes: list[str] = []

    def pin(self, owner: Owner, model: str, config: ModelConfig, source: Source) -> None:
        self.pinned += 1
        self.sources.append(source)

    def unpin(self, model: str, source: Source) -> None:
        self.unpinned.append(source)

    def spawn(self, owner: Owner, generation: Generation, program: Program, name: str, role: Role) -> None:
        assert (program.model, program.weights) == (SNAPSHOT.path, SNAPSHOT.weights)
        self.spawned.append((name, role))

    def resume(self, owner: Owner, generation: Generation, seal: SealRecord | None) -> bool:
        self.resumed.append((generation.label, seal))
        return seal == self.seal(generation)

    def changed(self) -> None:
        self.changes += 1

    def seal(self, generation: Generation) -> SealRecord | None:
        return SealRecord(1, 2) if generation.label in self.sealed else None

    def lives(self, name: str) -> bool:
        return name not in self.dead

    def forget(self, generation: Generation) -> None:
        self.forgotten.append(generation.label)

    def tell_updated(self, client: bytes, response: UpdateResponse) -> None:
        self.updated.append((client, response))

    def exported(self, generation: Generation) -> None:
        self.sealed.add(generation.label)

    def intact(self, generation: Generation) -> bool:
        return generation.label not in self.damaged

    def kill(self, name: str, *, abort: bool = False) -> None:
        (self.aborted if abort else self.killed).append(name)

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        self.orders.append((name, order))
        self.frames.append(frames)

    def answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        self.answers.append((request.number, outputs, frames))

    def refuse(self, request: Request, error: RequestError) -> None:
        self.refusals.append((request.number, error))

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        self.metadata.append((client, metadata))

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.errors.append((client, request_id, str(error)))
        self.codes.append(error.code)

    # --- what a test asks for ---

    def predicts(self) -> list[tuple[str, int]]:
        """Who was given which request since the last time."""
        given = [(name, order.request) for name, order in self.orders if isinstance(order, Predict)]
        self.orders = [each for each in self.orders if not isinstance(each[1], Predict)]
        return given

    def refused(self) -> list[tuple[int, str, str]]:
        refusals, self.refusals = self.refusals, []
        return [(number, error.code, str(error)) for number, error in refusals]


class Stage:
    """A model, its host, and the children's side of the talk."""

    def __init__(
        self,
        workers: int = 2,
        max_queue: int = 10,
        devices: tuple[str, ...] = ("cpu",),
        traits: Traits = CPU,
        sharing: str = "on",
    ) -> None:
        self.host = FakeHost()
        self.now = 1000.0
        self.traits = traits
        config = ModelConfig(
            path="/models/digits.onnx",
            engine="onnxruntime",
            workers=workers,
            max_queue=max_queue,
            devices=devices,
            sharing=sharing,
        )
        self.model = Model("digits", config, {name: Device(name) for name in devices}, self.host, self.host)
        self.model.start(self.now)

    def says(self, child: str, message: ChildMessage, frames: Sequence[Any] = ()) -> Stage:
        self.model.heard(child, message, frames, self.now)
        return self

    def building(self) -> Stage:
        self.model.pinned(self.host.sources[0], SNAPSHOT, self.now)
        for name, _ in list(self.host.spawned):
            self.says(name, Hello("1", SHA, {"weightd": VERSION}, self.traits))
        return self

    def built(self) -> Stage:
        self.building()
        return self.says(HOLDER, Built("/store", (X,), (Y,), ({"x": (2,)},), "canary", 4096))

    def serving(self) -> Stage:
        self.built()
        for name, role in list(self.host.spawned):
            if role is Role.WORKER:
                self.says(name, Attached("canary", 4000))
        self.host.orders.clear()
        return self

    def update(self, path: str = "/models/new.onnx", *, rollback: bool = False) -> Source:
        """An operator asks; return what was to be pinned last."""
        number = 1 + len(self.host.updated) + len(self.host.errors)
        self.model.update(
            b"operator", f"u{number}", self.now, path="" if rollback else path, weights="", rollback=rollback
        )
        return self.host.sources[-1]

    def loads(self, generation: int, *, workers: bool = True, built: Built | None = None) -> Stage:
        """The processes of a generation whose snapshot exists do what they should."""
        mine = [(name, role) for name, role in self.host.spawned if name.startswith(f"digits.{generation}.")]
        for name, _ in mine:
            self.says(name, Hello("1", SHA, {"weightd": VERSION}, self.traits))
        self.says(mine[0][0], built or Built("/store", (X,), (Y,), ({"x": (2,)},), "canary", 4096))
        for name, _ in mine[1:] if workers else []:
            self.says(name, Attached("canary", 4000))
        return self

    def goes(self, generation: int) -> Stage:
        """Every process of a generation exits, workers first."""
        mine = [name for name, _ in self.host.spawned if name.startswith(f"digits.{generation}.")]
        for name in [*mine[1:], mine[0]]:
            self.model.exited(name, End(0), self.now)
        return self

    def updated(self, generation: int, path: str) -> Source:
        """An update that succeeds."""
        source = self.update(path)
        self.model.pinned(source, SNAPSHOT, self.now)
        self.loads(generation)
        for leaving in list(self.model.deployments[0].leaving):
            self.goes(leaving.number)
        return source

    def submit(self, *requests: Request) -> list[int]:
        for each in requests:
            each.arrived = each.arrived or self.now
            self.model.infer(each, self.now)
        return [each.number for each in requests]


# --- loading --------------------------------------------------------------------------------------------------------


def test_it_loads_as_its_generation_wants() -> None:
    stage = Stage()
    host = stage.host
    assert (host.pinned, host.spawned) == (1, [])
    stage.building()
    assert host.spawned == [(HOLDER, Role.HOLDER), (W1, Role.WORKER), (W2, Role.WORKER)]
    assert [type(order) for _, order in host.orders] == [Build]
    stage.says(HOLDER, Built("/store", (X,), (Y,), ({"x": (2,)},), "canary", 4096))
    assert host.orders[-1] == (W1, Attach("/store", ({"x": (2,)},)))
    assert not stage.model.deployments[0].main.complete
    stage.says(W1, Attached("canary", 0))
    assert not stage.model.deployments[0].main.complete
    stage.says(W2, Attached("canary", 0))
    assert stage.model.deployments[0].main.complete


@pytest.mark.parametrize(
    ("sharing", "device", "copies"),
    [("on", "ascend:0", []), ("auto", "ascend:0", [False]), ("off", "ascend:0", []), ("auto", "cpu", [])],
)
def test_only_auto_on_a_card_falls_back_to_copies_in_each_process(
    sharing: str, device: str, copies: list[bool]
) -> None:
    stage = Stage(devices=(device,), traits=CARD, sharing=sharing).building()
    assert stage.model.main.terms.sharing == (sharing != "off")
    stage.says(HOLDER, Broken("it cannot share"))
    assert [each.terms.sharing for each in stage.model.generations if each.label != "digits.1"] == copies
    assert stage.model.has_failed != bool(copies)


def test_a_snapshot_that_takes_too_long_is_given_up() -> None:
    stage = Stage()
    stage.now = stage.model.next_event
    stage.model.tick(stage.now)
    assert stage.host.unpinned == stage.host.sources
    assert stage.model.main.cause == "no snapshot within load_timeout, 600 s"
    assert stage.model.has_failed
    # What becomes of its process is of no interest any more.
    stage.model.pin_failed(stage.host.sources[0], "killed by SIGKILL", stage.now)
    assert stage.model.main.cause == "no snapshot within load_timeout, 600 s"


def test_the_next_tick_is_the_generations() -> None:
    stage = Stage(workers=1)
    assert stage.model.next_event == stage.now + stage.model.config.load_timeout
    stage.now += 1.0
    stage.building()
    assert stage.model.next_event == stage.now + stage.model.config.load_timeout
    stage.now = stage.model.next_event
    stage.model.tick(stage.now)
    assert stage.host.aborted == [HOLDER]
    assert stage.model.next_event == stage.now + 2.0


def test_requests_that_come_while_it_loads_wait_and_are_checked_when_it_is_known_what_fits() -> None:
    stage = Stage()
    good, bad, again = stage.submit(request(), request(BAD), request())
    stage.building()
    assert stage.host.refused() == []
    stage.says(HOLDER, Built("/store", (X,), (Y,), ({"x": (2,)},), "canary", 4096))
    [(number, code, text)] = stage.host.refused()
    assert (number, code) == (bad, "INVALID_ARGUMENT")
    assert "x is missing" in text
    assert stage.host.predicts() == []
    stage.says(W1, Attached("canary", 0))
    assert stage.host.predicts() == [(W1, good), (W1, again)]
    assert stage.model.desk.failed == 1


def test_serving_starts_with_the_first_ready_worker() -> None:
    stage = Stage().built()
    stage.says(W1, Attached("canary", 0))
    [number] = stage.submit(request())
    assert stage.host.predicts() == [(W1, number)]
    assert stage.host.frames[-1] == (b"bytes",)


def test_a_request_expires_while_it_loads() -> None:
    stage = Stage()
    [number] = stage.submit(request(deadline=1005.0))
    stage.model.tick(1004.0)
    assert stage.host.refused() == []
    stage.model.tick(1005.0)
    text = "digits has no worker: pinning, not ready yet"
    assert stage.host.refused() == [(number, "UNAVAILABLE", text)]


def test_the_queue_is_bounded() -> None:
    stage = Stage(max_queue=2)
    stage.submit(request(), request())
    with pytest.raises(ResourceExhausted):
        stage.submit(request())


# --- serving --------------------------------------------------------------------------------------------------------


def test_an_answer_goes_to_who_asked_and_is_counted() -> None:
    stage = Stage().serving()
    [number] = stage.submit(request(arrived=stage.now))
    stage.now += 0.25
    stage.says(W1, Result(number, (OUT,)), (b"answer",))
    assert stage.host.answers == [(number, (OUT,), (b"answer",))]
    assert (
        stage.model.desk.latencies.count,
        stage.model.desk.by_process[W1].count,
        stage.model.desk.by_process[W2].count,
    ) == (1, 1, 0)
    assert stage.model.desk.latencies.percentile_us(50) == 250_000
    assert stage.model.desk.failed == 0


def test_an_answer_makes_room_for_the_next_request() -> None:
    stage = Stage(workers=1).serving()
    first, second, third = stage.submit(request(), request(), request())
    assert stage.host.predicts() == [(W1, first), (W1, second)]
    stage.says(W1, Result(first, (OUT,)))
    assert stage.host.predicts() == [(W1, third)]


def test_what_does_not_fit_is_refused_and_the_next_one_is_served() -> None:
    stage = Stage().serving()
    with pytest.raises(InvalidArgument, match="x is missing"):
        stage.submit(request(BAD))
    [number] = stage.submit(request())
    assert stage.host.predicts() == [(W1, number)]


@pytest.mark.parametrize("child", [HOLDER, W2, "stranger"])
def test_an_answer_that_nobody_asked_for_is_dropped(child: str) -> None:
    stage = Stage().serving()
    [number] = stage.submit(request())
    stage.says(child, Result(number, (OUT,)))
    stage.says(child, Failed(number, "INTERNAL", "x", leaving=False))
    assert (stage.host.answers, stage.host.refused()) == ([], [])
    stage.says(W1, Result(number, (OUT,)))
    stage.says(W1, Result(number, (OUT,)))
    assert len(stage.host.answers) == 1


def test_a_late_answer_is_dropped() -> None:
    stage = Stage().serving()
    [number] = stage.submit(request(deadline=1005.0))
    stage.model.tick(1005.0)
    assert stage.host.refused() == [(number, "DEADLINE_EXCEEDED", "was running at its deadline")]
    stage.says(W1, Result(number, (OUT,)))
    assert (stage.host.answers, stage.model.desk.latencies.count) == ([], 0)


def test_a_predict_that_fails_harmlessly_costs_nobody_else() -> None:
    stage = Stage(workers=1).serving()
    first, second = stage.submit(request(), request())
    stage.says(W1, Failed(first, "INVALID_ARGUMENT", "out of range", leaving=False))
    assert stage.host.refused() == [(first, "INVALID_ARGUMENT", "out of range")]
    stage.says(W1, Result(second, (OUT,)))
    assert [number for number, _, _ in stage.host.answers] == [second]
    assert (stage.host.orders[1:], stage.model.desk.failed) == ([(W1, Predict(second, (GOOD,)))], 1)


def test_a_spoilt_worker_gets_nothing_more_and_what_it_had_runs_elsewhere() -> None:
    stage = Stage(workers=2).serving()
    one, two, three, four, five = stage.submit(*(request() for _ in range(5)))
    assert stage.host.predicts() == [(W1, one), (W2, two), (W1, three), (W2, four)]
    stage.says(W1, Failed(one, "INTERNAL", "spoilt", leaving=True))
    assert stage.host.refused() == [(one, "INTERNAL", "spoilt")]
    assert (W1, Stop()) in stage.host.orders
    assert stage.host.spawned[-1] == ("digits.1.w3", Role.WORKER)
    stage.says(W2, Result(two, (OUT,)))
    stage.says(W2, Result(four, (OUT,)))
    # The head of the queue is what the spoilt worker had.
    assert stage.host.predicts() == [(W2, three), (W2, five)]
    stage.model.exited(W1, End(75), stage.now)
    assert stage.host.refused() == []
    assert W1 not in stage.model.desk.by_process


def test_what_a_dead_worker_had_runs_elsewhere_once() -> None:
    stage = Stage(workers=2).serving()
    [number] = stage.submit(request())
    assert stage.host.predicts() == [(W1, number)]
    stage.model.exited(W1, End(-signal.SIGSEGV), stage.now)
    assert stage.host.predicts() == [(W2, number)]
    stage.model.exited(W2, End(-signal.SIGSEGV), stage.now)
    assert stage.host.refused() == [
        (number, "INTERNAL", f"request id{number} was on 2 workers when they died, the last one killed by SIGSEGV")
    ]
    assert stage.host.predicts() == []
    assert stage.model.deployments[0].main.state is GenerationState.SERVING


# --- metadata -------------------------------------------------------------------------------------------------------


def test_metadata_is_told_at_once_or_when_it_is_known() -> None:
    stage = Stage()
    stage.model.metadata(b"early", "1")
    assert stage.host.metadata == []
    stage.built()
    expected = ModelMetadataResponse("1", "digits", "onnxruntime", (X,), (Y,))
    assert stage.host.metadata == [(b"early", expected)]
    stage.model.metadata(b"late", "2")
    assert [client for client, _ in stage.host.metadata] == [b"early", b"late"]


def test_only_so_many_may_wait_for_metadata() -> None:
    stage = Stage(max_queue=2)
    stage.model.metadata(b"a", "1")
    stage.model.metadata(b"b", "2")
    with pytest.raises(ResourceExhausted, match="2 requests wait for the metadata already"):
        stage.model.metadata(b"c", "3")
    stage.built()
    stage.model.metadata(b"c", "3")
    assert len(stage.host.metadata) == 3


# --- update ---------------------------------------------------------------------------------------------------------

CARD = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
OTHER = Built("/store", (Y,), (Y,), ({"x": (2,)},), "canary", 4096)


def test_an_update_takes_over_when_it_is_complete_and_who_asked_is_told_once() -> None:
    stage = Stage(workers=2).serving()
    source = stage.update("/models/new.onnx")
    assert source == Source("/models/new.onnx", "", 2)
    stage.model.pinned(source, SNAPSHOT, stage.now)
    stage.loads(2, workers=False)
    first, second = stage.submit(request(), request())
    stage.says("digits.2.w1", Attached("canary", 1))
    assert stage.host.predicts() == [(W1, first), (W2, second)]
    assert stage.host.updated == []
    stage.says("digits.2.w2", Attached("canary", 1))
    configured = "/models/digits.onnx"
    response = UpdateResponse("u1", "digits", (2,), "/models/new.onnx", "", configured)
    assert stage.host.updated == [(b"operator", response)]
    assert stage.model.source.path == "/models/new.onnx"
    # From now on requests go there; what the old ones have they may finish.
    [third] = stage.submit(request())
    assert stage.host.predicts() == [("digits.2.w1", third)]
    stage.says(W1, Result(first, (OUT,)))
    assert [number for number, _, _ in stage.host.answers] == [first]
    stage.goes(1)
    stage.says("digits.2.w1", Attached("canary", 1))
    assert (len(stage.host.updated), stage.host.errors, stage.host.forgotten) == (1, [], ["digits.1"])


def test_after_an_update_it_takes_the_sizes_of_what_took_over() -> None:
    built = Built("/store", (X,), (Y,), ({"x": (2,)},), "canary", 4096)
    stage = Stage(workers=1).building().says(HOLDER, dataclasses.replace(built, gears=((2,),)))
    stage.says(W1, Attached("canary", 4000))
    with pytest.raises(InvalidArgument, match=r"expected 2, got 5"):
        stage.submit(request())
    stage.model.pinned(stage.update(), SNAPSHOT, stage.now)
    stage.loads(2, built=dataclasses.replace(built, gears=((2,), (5,))))
    [number] = stage.submit(request())
    assert stage.host.predicts() == [("digits.2.w1", number)]


def test_an_update_keeps_the_file_where_only_the_weights_are_new() -> None:
    stage = Stage(workers=1).serving()
    stage.model.update(b"o", "1", stage.now, path="", weights="/w.npz", rollback=False)
    assert stage.host.sources[-1] == Source("/models/digits.onnx", "/w.npz", 2)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("no snapshot", "FAILED_PRECONDITION"),
        ("no build", "FAILED_PRECONDITION"),
        ("killed", "UNAVAILABLE"),
        ("other inputs", "FAILED_PRECONDITION"),
        ("no worker", "FAILED_PRECONDITION"),
    ],
)
def test_an_update_that_fails_changes_nothing_and_who_asked_is_told_once(how: str, code: str) -> None:
    stage = Stage(workers=1).serving()
    source = stage.update()
    if how == "no snapshot":
        stage.model.pin_failed(source, "no such file", stage.now)
    else:
        stage.model.pinned(source, SNAPSHOT, stage.now)
    if how == "no build":
        stage.says("digits.2.holder", Broken("not a model"))
    if how == "killed":
        stage.model.exited("digits.2.holder", End(-signal.SIGSEGV), stage.now)
    if how == "other inputs":
        stage.loads(2, workers=False, built=OTHER)
    if how == "no worker":
        stage.loads(2, workers=False)
        stage.says("digits.2.holder", Broken("gone"))
        for number in (1, 2, 3):
            stage.model.exited(f"digits.2.w{number}", End(-signal.SIGSEGV), stage.now)
            stage.now += 1.0
            stage.model.tick(stage.now)
    [(client, request_id, text)] = stage.host.errors
    causes = {
        "no snapshot": "no such file",
        "no build": "digits.2.holder: not a model",
        "killed": "digits.2.holder: killed by SIGSEGV",
        "other inputs": "the new model is not a drop-in for the one that serves: inputs: "
        "expected x FP32 [-1, 2], got y FP32 [-1, 3]",
        "no worker": "digits.2.w3: killed by SIGSEGV",
    }
    assert (client, request_id, text) == (b"operator", "u1", f"not updated: {causes[how]}")
    assert stage.host.codes == [code]
    assert stage.host.unpinned == ([] if how == "no snapshot" else [source])
    [number] = stage.submit(request())
    assert stage.host.predicts() == [(W1, number)]
    if how != "no snapshot":
        stage.goes(2)
    assert (len(stage.host.errors), stage.host.updated) == (1, [])
    # The next one may be tried.
    stage.updated(3, "/models/third.onnx")
    assert [each.generations for _, each in stage.host.updated] == [(3,)]


def test_a_second_update_is_refused_while_the_first_one_loads() -> None:
    stage = Stage(workers=1).serving()
    stage.update()
    with pytest.raises(Unavailable, match="digits is being updated already"):
        stage.update()
    assert stage.model.generations[-1].label == "digits.2"


def test_an_update_is_refused_while_it_loads() -> None:
    stage = Stage(workers=1).building()
    with pytest.raises(Unavailable, match="digits is loading on cpu: try again once it serves"):
        stage.update()


@pytest.mark.parametrize("path", ["/models/new.bin", "/models/new", "/models/new.mindir", "/models/new.ONNX"])
def test_an_update_is_held_to_the_suffix_of_its_engine(path: str) -> None:
    stage = Stage(workers=1).serving()
    with pytest.raises(InvalidArgument, match=f"expected a .onnx file for engine onnxruntime, got '{path}'"):
        stage.update(path)
    assert len(stage.model.generations) == 1


def test_there_is_nothing_to_go_back_to_before_an_update() -> None:
    stage = Stage(workers=1).serving()
    with pytest.raises(FailedPrecondition, match=r"nothing to go back to: digits serves /models/digits\.onnx"):
        stage.update(rollback=True)


def test_a_rollback_loads_the_old_bytes_again_and_a_second_one_is_refused() -> None:
    stage = Stage(workers=1).serving()
    new = stage.updated(2, "/models/new.onnx")
    stage.update(rollback=True)
    # Its snapshot was kept: nothing is copied, and what is in the file by now does not matter.
    assert (stage.host.pinned, stage.host.unpinned) == (2, [])
    stage.loads(3).goes(2)
    assert [(each.generations, each.path) for _, each in stage.host.updated] == [
        ((2,), "/models/new.onnx"),
        ((3,), "/models/digits.onnx"),
    ]
    serving = stage.model.deployments[0].serving
    assert serving is not None
    assert serving.source == Source("/models/digits.onnx")
    with pytest.raises(FailedPrecondition) as caught:
        stage.update(rollback=True)
    went = "from /models/new.onnx to /models/digits.onnx"
    assert str(caught.value) == f"digits was rolled back already, {went}: update it to go forth again"
    assert (stage.host.pinned, stage.host.unpinned) == (2, [new])
    # A further update is one that can be gone back from.
    stage.updated(4, "/models/newer.onnx")
    stage.update(rollback=True)
    stage.loads(5).goes(4)
    assert stage.model.source == Source("/models/digits.onnx")


def test_a_rollback_that_fails_keeps_what_it_can_go_back_to() -> None:
    stage = Stage(workers=1).serving()
    stage.updated(2, "/models/new.onnx")
    stage.update(rollback=True)
    stage.says("digits.3.holder", Broken("no memory"))
    assert len(stage.host.errors) == 1
    assert stage.host.unpinned == []
    stage.goes(3)
    stage.update(rollback=True)
    stage.loads(4).goes(2)
    assert len(stage.host.updated) == 2


def test_a_snapshot_goes_when_nothing_can_go_back_to_it() -> None:
    stage = Stage(workers=1).serving()
    second = stage.updated(2, "/models/new.onnx")
    assert stage.host.unpinned == []
    stage.updated(3, "/models/newer.onnx")
    assert stage.host.unpinned == [Source("/models/digits.onnx")]
    stage.updated(4, "/models/newest.onnx")
    assert stage.host.unpinned == [Source("/models/digits.onnx"), second]


def test_an_update_is_given_up_when_it_is_drained() -> None:
    stage = Stage(workers=1).serving()
    source = stage.update()
    stage.model.drain(stage.now)
    assert stage.host.errors == [(b"operator", "u1", "not updated: weightd is stopping")]
    assert stage.host.codes == ["UNAVAILABLE"]
    assert stage.host.unpinned == [source]
    stage.model.pin_failed(source, "killed by SIGKILL", stage.now)
    stage.goes(1)
    assert (len(stage.host.errors), stage.host.unpinned) == (1, [source])


def test_all_devices_take_over_together() -> None:
    stage = Stage(workers=1, devices=("ascend:0", "ascend:1"))
    stage.model.pinned(stage.host.sources[0], SNAPSHOT, stage.now)
    stage.loads(1).loads(2)
    assert stage.host.pinned == 1
    stage.model.pinned(stage.update(), SNAPSHOT, stage.now)
    stage.loads(3)
    assert stage.host.updated == []
    stage.host.predicts()
    one, two = stage.submit(request(), request())
    assert stage.host.predicts() == [("digits.1.w1", one), ("digits.2.w1", two)]
    stage.loads(4)
    assert [each.generations for _, each in stage.host.updated] == [(3, 4)]


def test_if_one_device_cannot_none_does() -> None:
    stage = Stage(workers=1, devices=("ascend:0", "ascend:1"))
    stage.model.pinned(stage.host.sources[0], SNAPSHOT, stage.now)
    stage.loads(1).loads(2)
    source = stage.update()
    stage.model.pinned(source, SNAPSHOT, stage.now)
    stage.loads(3)
    stage.says("digits.4.holder", Broken("no memory"))
    assert stage.host.errors == [(b"operator", "u1", "not updated: digits.4.holder: no memory")]
    assert ("digits.3.w1", Stop()) in stage.host.orders
    assert stage.host.unpinned == [source]
    assert [each.serving.label for each in stage.model.deployments if each.serving] == ["digits.1", "digits.2"]
    stage.goes(3).goes(4)
    assert stage.host.updated == []
    assert len(stage.host.errors) == 1


# --- weights that are gone with their holder ------------------------------------------------------------------------


def test_what_is_computed_on_lost_weights_is_dropped_and_run_again_without_blame() -> None:
    stage = Stage(workers=1, devices=("ascend:0",), traits=CARD).serving()
    [number] = stage.submit(request())
    stage.host.predicts()
    for generation in range(1, 5):
        holder, worker = f"digits.{generation}.holder", f"digits.{generation}.w1"
        stage.now += 60.0
        # The kernel knows; the model is told later.
        stage.host.dead.add(holder)
        stage.says(worker, Result(number, (OUT,)))
        stage.says(worker, Failed(number, "INTERNAL", "spoilt", leaving=True))
        stage.says(worker, Failed(number, "INVALID_ARGUMENT", "no such batch", leaving=False))
        assert (stage.host.answers, stage.host.refused()) == ([], [])
        if generation % 2:
            stage.model.exited(holder, End(-signal.SIGSEGV), stage.now)
            assert stage.host.killed[-1] == worker
            stage.says(worker, Result(number, (OUT,)))
            stage.model.exited(worker, End(-signal.SIGKILL), stage.now)
        else:
            # The worker died of it, and is told of first.
            stage.model.exited(worker, End(-signal.SIGSEGV), stage.now)
            stage.goes(generation)
        stage.loads(generation + 1)
        assert stage.host.predicts() == [(f"digits.{generation + 1}.w1", number)]
    stage.says("digits.5.w1", Result(number, (OUT,)))
    assert [each for each, _, _ in stage.host.answers] == [number]


def test_a_deadline_while_nobody_serves_tells_why_nobody_does() -> None:
    stage = Stage(workers=1, devices=("ascend:0",), traits=CARD).serving()
    stage.model.exited("digits.1.holder", End(-signal.SIGSEGV), stage.now)
    [number] = stage.submit(request(deadline=1005.0))
    stage.goes(1)
    stage.model.tick(1005.0)
    [(refused, code, text)] = stage.host.refused()
    assert (refused, code) == (number, "UNAVAILABLE")
    assert text.startswith("digits has no worker: spawned, 0/2 processes up, ")


# --- the end --------------------------------------------------------------------------------------------------------


def test_when_it_fails_everyone_who_waits_is_told_why() -> None:
    stage = Stage(workers=1)
    stage.model.metadata(b"curious", "7")
    [number] = stage.submit(request())
    stage.model.pin_failed(stage.host.sources[0], "no such file", stage.now)
    text = "digits failed: no such file"
    assert stage.host.refused() == [(number, "FAILED_PRECONDITION", text)]
    assert stage.host.codes == ["FAILED_PRECONDITION"]
    assert stage.host.errors == [(b"curious", "7", text)]
    with pytest.raises(FailedPrecondition, match=text):
        stage.submit(request())
    with pytest.raises(FailedPrecondition, match=text):
        stage.model.metadata(b"curious", "8")
    with pytest.raises(FailedPrecondition, match=text):
        stage.update()
    assert stage.model.has_failed


def test_when_a_generation_fails_what_runs_may_still_be_answered_and_the_rest_waits_for_the_next() -> None:
    stage = Stage(workers=1).serving()
    first, second, third = stage.submit(request(), request(), request())
    stage.host.predicts()
    stage.model.deployments[0].main.failed("whatever", stage.now)
    stage.says(W1, Broken("what it says after that"))
    stage.says(W1, Result(first, (OUT,)))
    assert [number for number, _, _ in stage.host.answers] == [first]
    stage.model.exited(W1, End(-signal.SIGSEGV), stage.now)
    assert stage.host.refused() == []
    stage.goes(1)
    stage.loads(2)
    assert stage.host.predicts() == [("digits.2.w1", second)]  # alone, for it may be why
    stage.says("digits.2.w1", Result(second, (OUT,)))
    assert stage.host.predicts() == [("digits.2.w1", third)]


def test_a_broken_holder_fails_it() -> None:
    stage = Stage(workers=1).building().says(HOLDER, Broken("not a model"))
    with pytest.raises(FailedPrecondition, match=f"^digits failed: {HOLDER}: not a model$"):
        stage.submit(request())


def test_draining_gives_up_what_waits_and_finishes_what_runs() -> None:
    stage = Stage(workers=1).serving()
    first, second, third = stage.submit(request(), request(), request())
    stage.host.predicts()
    stage.model.drain(stage.now)
    assert stage.host.refused() == [(third, "UNAVAILABLE", "weightd is stopping")]
    assert (W1, Stop()) in stage.host.orders
    with pytest.raises(Unavailable, match="digits is being unloaded"):
        stage.submit(request())
    stage.says(W1, Result(first, (OUT,)))
    stage.says(W1, Result(second, (OUT,)))
    assert len(stage.host.answers) == 2
    stage.model.exited(W1, End(0), stage.now)
    assert stage.host.orders[-1] == (HOLDER, Stop())
    stage.model.exited(HOLDER, End(0), stage.now)
    assert stage.model.deployments[0].main.state is GenerationState.GONE
    assert stage.host.refused() == []


def test_what_a_worker_has_not_answered_when_it_is_gone_is_answered_at_the_end() -> None:
    stage = Stage(workers=1).serving()
    [number] = stage.submit(request())
    stage.model.metadata(b"curious", "7")
    stage.model.drain(stage.now)
    stage.model.exited(W1, End(-signal.SIGSEGV), stage.now)
    assert stage.host.predicts() == [(W1, number)]
    stage.model.exited(HOLDER, End(0), stage.now)
    assert stage.host.refused() == [(number, "UNAVAILABLE", "digits is being unloaded")]
    assert stage.model.desk.scheduler.idle


def test_draining_while_it_loads_answers_everyone() -> None:
    stage = Stage(workers=1).building()
    [number] = stage.submit(request())
    stage.model.metadata(b"curious", "7")
    stage.model.drain(stage.now)
    assert stage.host.refused() == [(number, "UNAVAILABLE", "weightd is stopping")]
    for name in (W1, HOLDER):
        stage.model.exited(name, End(0), stage.now)
    assert stage.host.errors == [(b"curious", "7", "digits is being unloaded")]
    assert stage.model.deployments[0].main.state is GenerationState.GONE


@pytest.mark.parametrize(("device", "generations"), [("cpu", 1), ("ascend:0", 2)])
def test_only_on_a_card_another_generation_follows_one_that_cannot_share(device: str, generations: int) -> None:
    host = FakeHost()
    config = ModelConfig(path="/m.mindir", engine="mindspore_lite", devices=(device,), sharing="auto")
    model = Model("digits", config, {device: Device(device)}, host, host)
    model.start(0.0)
    model.pinned(host.sources[0], SNAPSHOT, 0.0)
    model.heard(HOLDER, Broken("no handle"), (), 0.0)
    for name in (HOLDER, W1):
        model.exited(name, End(-signal.SIGKILL), 0.0)
    assert len({name.rpartition(".")[0] for name, _ in host.spawned}) == generations
    assert model.has_failed == (device == "cpu")
