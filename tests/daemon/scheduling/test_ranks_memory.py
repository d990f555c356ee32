"""Memory of clients and a slot of ranks: one of them may write there, and only where no other one still reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from testkit.desks import IgnoringSink
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import ChildOrder, Predict, PredictFailed, PredictResult

KILLED = ExitCause(-9, initiator=ExitInitiator.DAEMON)
ASKED = RequestDescription("m", (TensorSpec("x", "UINT8", (1, 8)),))


def memory(gone: Callable[[int], object] = os.close) -> SharedRegion:
    return SharedRegion(1, os.memfd_create("test"), 100, gone)


class Bench(IgnoringSink):
    """A dispatcher with one request, whose inputs are the first 8 bytes of its client's memory."""

    def __init__(self, room: int = 8) -> None:
        self.desk = Dispatcher(
            "m", ModelConfig(path="/m.onnx", engine="onnxruntime"), self, self.send_order, lambda _: None
        )
        self.memory = memory()
        self.rooms: list[tuple[str, bool]] = []
        self.told: list[tuple[str, bool]] = []
        places = TensorLocations({0: TensorLocation(self.memory, 0, 8)}, {0: TensorLocation(self.memory, room, 8)})
        self.request = Request(1, b"c", "id", ASKED, [], 0.0, 1e9, 8, locations=places)
        self.desk.infer(self.request, 0.0)

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        self.told.append(("answer", bool(request.pending_writes)))

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.told.append((error.code, bool(request.pending_writes)))

    def notify_released(self, request: Request) -> None:
        self.told.append(("released", bool(request.pending_writes)))

    def send_order(
        self, process: str, order: ChildOrder, frames: Sequence[Any], memories: Sequence[SharedRegion]
    ) -> None:
        assert isinstance(order, Predict)
        assert order.regions is not None
        assert (list(frames), list(memories)) == ([], [self.memory])
        assert [each.tensor_index for each in order.regions.inputs] == [0]
        self.rooms.append((process, bool(order.regions.outputs)))

    def load(self, name: str, *, reply: int | None = 1) -> list[tuple[str, bool]]:
        """Another group has the request: return who has room for outputs."""
        self.rooms.clear()
        ranks = (f"{name}0", f"{name}1")
        self.desk.processes.add_ranks(name, LockstepTracker(ranks, None if reply is None else ranks[reply]), 0.0)
        self.desk.dispatch(0.0)
        return [*self.rooms]

    def result(self, process: str) -> str:
        spec = TensorSpec("y", "UINT8", (1, 8))
        return self.desk.results.on_result(process, PredictResult(1, ResponseDescription("m", (spec,)), (0,)), [], 0.0)


def test_what_has_been_written_is_the_answer_once_all_have_run() -> None:
    bench = Bench()
    bench.load("a")
    assert (bench.result("a1"), bench.told) == ("", [])
    assert bench.desk.results.on_done("a0", 1, 0.0) == ""
    assert bench.told == [("answer", False)]


def lost(bench: Bench) -> None:
    bench.desk.results.on_exit("a0", ExitCause(-11), 0.0)


def broken(bench: Bench) -> None:
    assert bench.desk.results.on_done("a1", 1, 0.0) != ""


def failed(bench: Bench) -> None:
    assert bench.desk.results.on_batch_failed("a0", PredictFailed(1, "INTERNAL", "no", is_exiting=True), 0.0) != ""


def test_the_region_is_kept_until_nobody_can_be_given_it_again() -> None:
    gone: list[int] = []
    bench = Bench()
    bench.memory = memory(gone.append)
    bench.request.locations = TensorLocations({0: TensorLocation(bench.memory, 0, 8)}, {})
    bench.load("a")
    bench.desk.on_disconnect(b"c", 0.0)
    del bench.memory, bench.request
    assert gone == []
    for process in ("a0", "a1"):
        bench.desk.results.on_exit(process, KILLED, 0.0)
    [descriptor] = gone
    os.close(descriptor)
