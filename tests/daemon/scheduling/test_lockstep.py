"""Reports of a rank group's processes: a batch item ends only after all have reported, with matching reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from weightd_daemon.scheduling.lockstep import InferenceResult, LockstepTracker, Outcome, OutOfStep, Rejected
from weightd_protocol import limits
from weightd_protocol.messages.inference import ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import PredictFailed, PredictResult

RANKS = ("r0", "r1", "r2")


def result(
    number: int = 7, shape: tuple[int, ...] = (1, 2), name: str = "y", placed: tuple[int, ...] | None = None
) -> PredictResult:
    return PredictResult(number, ResponseDescription("m", (TensorSpec(name, "UINT8", shape),)), placed)


def refusal(number: int = 7, code: str = "INVALID_ARGUMENT") -> PredictFailed:
    return PredictFailed(number, code, "no", is_exiting=False)


def tracker_at_step_5(reply: str | None = "r2") -> LockstepTracker:
    tracker = LockstepTracker(RANKS, reply, step=4)
    assert tracker.start(7) == 5
    return tracker


def test_each_item_has_the_next_step() -> None:
    tracker = LockstepTracker(RANKS, "r0")
    assert [tracker.start(number) for number in (9, 4, 11)] == [1, 2, 3]
    assert tracker.step == 3


def test_result_is_returned_after_all_ranks() -> None:
    tracker, view = tracker_at_step_5(), memoryview(bytearray(b"ab"))
    assert tracker.on_done("r0", 7) is None
    assert tracker.on_result("r2", result(), [view]) is None
    view[:] = b"??"  # the receive buffer is reused
    assert tracker.on_done("r1", 7) == InferenceResult(result(), [b"ab"])


def test_last_result_is_returned_without_a_copy() -> None:
    tracker, view = tracker_at_step_5(), memoryview(b"ab")
    tracker.on_done("r0", 7)
    tracker.on_done("r1", 7)
    outcome = tracker.on_result("r2", result(), [view])
    assert isinstance(outcome, InferenceResult)
    assert outcome.frames[0] is view


def test_items_of_a_batch_end_separately() -> None:
    tracker = tracker_at_step_5()
    tracker.start(8)
    for number in (7, 8):
        for rank in ("r0", "r1"):
            assert tracker.on_done(rank, number) is None
    assert tracker.on_result("r2", result(7), [b"ab"]) == InferenceResult(result(7), [b"ab"])
    assert tracker.on_result("r2", result(8), [b"cd"]) == InferenceResult(result(8), [b"cd"])


def test_joins_slices_in_the_order_of_ranks() -> None:
    tracker = tracker_at_step_5(reply=None)
    assert tracker.on_result("r2", result(shape=(1, 2)), [b"ef"]) is None
    assert tracker.on_result("r0", result(shape=(2, 2)), [b"abcd"]) is None
    assert tracker.on_result("r1", result(shape=(0, 2)), [b""]) == InferenceResult(result(shape=(3, 2)), [b"abcdef"])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (result(shape=(1, 3)), "output y of a rank: expected UINT8 [any, 2], got y UINT8 [1, 3]"),
        (result(shape=()), "output y of a rank: expected UINT8 [any, 2], got y UINT8 []"),
        (result(name="z"), "output y of a rank: expected UINT8 [any, 2], got z UINT8 [1, 2]"),
        (PredictResult(7, ResponseDescription("m", ())), "output y of a rank: expected UINT8 [any, 2], got none"),
        (
            PredictResult(7, ResponseDescription("m", (*result().description.outputs, TensorSpec("z", "UINT8", (1,))))),
            "outputs of a rank: expected 1, got 2",
        ),
    ],
)
def test_mismatching_slices_are_an_error_of_the_request(other: PredictResult, text: str) -> None:
    tracker = tracker_at_step_5(reply=None)
    tracker.on_result("r0", result(), [b"ab"])
    tracker.on_result("r1", other, [b""] * len(other.description.outputs))
    outcome = tracker.on_result("r2", result(), [b"ab"])
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("INTERNAL", text)


@pytest.mark.parametrize("most", [5, 3])
def test_oversized_result_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", most)
    tracker = tracker_at_step_5(reply=None)
    for rank in RANKS[:2]:
        assert tracker.on_result(rank, result(), [b"ab"]) is None
    outcome = tracker.on_result("r2", result(), [b"ab"])
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("RESOURCE_EXHAUSTED", f"the answer has more than {most} bytes")


def test_rejection_by_all_ranks_is_an_error_of_the_request() -> None:
    tracker = tracker_at_step_5()
    assert tracker.on_failed("r1", refusal(code="RESOURCE_EXHAUSTED")) is None
    assert tracker.on_failed("r0", refusal()) is None
    outcome = tracker.on_failed("r2", refusal())
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("INVALID_ARGUMENT", "no")


Action = Callable[[LockstepTracker], Outcome | None]


def report_of(process: str, report: PredictResult | PredictFailed | int, frames: Sequence[bytes] = (b"ab",)) -> Action:
    if isinstance(report, PredictResult):
        return lambda tracker: tracker.on_result(process, report, frames)
    if isinstance(report, PredictFailed):
        return lambda tracker: tracker.on_failed(process, report)
    return lambda tracker: tracker.on_done(process, report)


@pytest.mark.parametrize(
    ("reply", "before", "last", "text"),
    [
        ("r2", report_of("r0", 7), report_of("r1", refusal()), "7 was rejected by r1 and executed by r0"),
        ("r2", report_of("r0", refusal()), report_of("r2", result()), "7 was rejected by r0 and executed by r2"),
        ("r2", report_of("r0", 7), report_of("r0", 7), "r0: for 7 expected one report, got done after done"),
        (
            "r2",
            report_of("r2", result()),
            report_of("r2", refusal()),
            "r2: for 7 expected one report, got INVALID_ARGUMENT after a result",
        ),
        ("r2", report_of("r0", 7), report_of("r1", result()), "r1: for 7 expected done, got a result"),
        ("r2", report_of("r0", 7), report_of("r2", 7), "r2: for 7 expected a result, got done"),
        (None, report_of("r0", result()), report_of("r1", 7), "r1: for 7 expected a result, got done"),
        (
            None,
            report_of("r0", result()),
            report_of("r1", result(placed=(0,)), ()),
            "r1: for 7 expected frames, got outputs in shared memory",
        ),
        ("r2", report_of("r0", 7), report_of("r1", 8), "r1: got done for 8, which was not sent to this process"),
        ("r2", report_of("r0", 7), report_of("x", 7), "x: got done for 7, which was not sent to this process"),
    ],
)
def test_detects_ranks_out_of_step(reply: str | None, before: Action, last: Action, text: str) -> None:
    tracker = tracker_at_step_5(reply)
    assert before(tracker) is None
    assert last(tracker) == OutOfStep(text)


def test_ended_item_is_not_accepted_again() -> None:
    tracker = tracker_at_step_5()
    for rank in ("r0", "r1"):
        tracker.on_done(rank, 7)
    tracker.on_result("r2", result(), [b"ab"])
    assert isinstance(tracker.on_done("r1", 7), OutOfStep)


def test_reply_must_be_one_of_the_ranks() -> None:
    with pytest.raises(ValueError, match="reply: expected one of r0, r1, r2, got r3"):
        LockstepTracker(RANKS, "r3")
