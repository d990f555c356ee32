"""Shared memory and rank groups: only the replying rank writes, and only where no rank still reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from testkit.dispatching import IgnoringSink
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import ChildOrder, Predict, PredictResult

KILLED = ExitCause(-9, initiator=ExitInitiator.DAEMON)
ASKED = RequestDescription("m", (TensorSpec("x", "UINT8", (1, 8)),))


def memory(gone: Callable[[int], object] = os.close) -> SharedRegion:
    return SharedRegion(1, os.memfd_create("test"), 100, gone)


class RankGroupHarness(IgnoringSink):
    """A dispatcher with one request whose input is the first 8 bytes of the client's memory."""

    def __init__(self, output_offset: int = 8) -> None:
        self.dispatcher = Dispatcher(
            "m", ModelConfig(path="/m.onnx", engine="onnxruntime"), self, self.send_order, lambda _: None
        )
        self.memory = memory()
        self.may_write: list[tuple[str, bool]] = []
        self.replies: list[tuple[str, bool]] = []
        locations = TensorLocations(
            {0: TensorLocation(self.memory, 0, 8)}, {0: TensorLocation(self.memory, output_offset, 8)}
        )
        self.request = Request(1, b"c", "id", ASKED, [], 0.0, 1e9, 8, locations=locations)
        self.dispatcher.infer(self.request, 0.0)

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        self.replies.append(("answer", bool(request.pending_writes)))

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.replies.append((error.code, bool(request.pending_writes)))

    def notify_released(self, request: Request) -> None:
        self.replies.append(("released", bool(request.pending_writes)))

    def send_order(
        self, process: str, order: ChildOrder, frames: Sequence[Any], memories: Sequence[SharedRegion]
    ) -> None:
        assert isinstance(order, Predict)
        assert order.regions is not None
        assert (list(frames), list(memories)) == ([], [self.memory])
        assert [each.tensor_index for each in order.regions.inputs] == [0]
        self.may_write.append((process, bool(order.regions.outputs)))

    def add_group(self, name: str, *, reply: int | None = 1) -> list[tuple[str, bool]]:
        """Add a group, which gets the request; return each process and whether it may write outputs."""
        self.may_write.clear()
        ranks = (f"{name}0", f"{name}1")
        self.dispatcher.processes.add_ranks(name, LockstepTracker(ranks, None if reply is None else ranks[reply]), 0.0)
        self.dispatcher.dispatch(0.0)
        return [*self.may_write]

    def result(self, process: str) -> str:
        spec = TensorSpec("y", "UINT8", (1, 8))
        return self.dispatcher.results.on_result(
            process, PredictResult(1, ResponseDescription("m", (spec,)), (0,)), [], 0.0
        )


def test_written_output_is_the_result_after_all_ranks() -> None:
    harness = RankGroupHarness()
    harness.add_group("a")
    assert (harness.result("a1"), harness.replies) == ("", [])
    assert harness.dispatcher.results.on_done("a0", 1, 0.0) == ""
    assert harness.replies == [("answer", False)]


def test_region_is_kept_until_no_process_can_write() -> None:
    gone: list[int] = []
    harness = RankGroupHarness()
    harness.memory = memory(gone.append)
    harness.request.locations = TensorLocations({0: TensorLocation(harness.memory, 0, 8)}, {})
    harness.add_group("a")
    harness.dispatcher.on_disconnect(b"c", 0.0)
    del harness.memory, harness.request
    assert gone == []
    for process in ("a0", "a1"):
        harness.dispatcher.results.on_exit(process, KILLED, 0.0)
    [descriptor] = gone
    os.close(descriptor)
