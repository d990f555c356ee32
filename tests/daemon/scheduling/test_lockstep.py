"""What comes of what the processes of a slot say of a part: nothing before all have said it, and all alike."""

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


def in_step(reply: str | None = "r2") -> LockstepTracker:
    made = LockstepTracker(RANKS, reply, step=4)
    assert made.start(7) == 5
    return made


def test_each_part_has_the_next_step() -> None:
    made = LockstepTracker(RANKS, "r0")
    assert [made.start(number) for number in (9, 4, 11)] == [1, 2, 3]
    assert made.step == 3


def test_the_reply_is_passed_on_once_all_have_run() -> None:
    made, view = in_step(), memoryview(bytearray(b"ab"))
    assert made.on_done("r0", 7) is None
    assert made.on_result("r2", result(), [view]) is None
    view[:] = b"??"  # it is received into
    assert made.on_done("r1", 7) == InferenceResult(result(), [b"ab"])


def test_what_has_come_last_is_passed_on_without_a_copy() -> None:
    made, view = in_step(), memoryview(b"ab")
    made.on_done("r0", 7)
    made.on_done("r1", 7)
    outcome = made.on_result("r2", result(), [view])
    assert isinstance(outcome, InferenceResult)
    assert outcome.frames[0] is view


def test_parts_of_one_job_are_told_of_each_by_itself() -> None:
    made = in_step()
    made.start(8)
    for number in (7, 8):
        for rank in ("r0", "r1"):
            assert made.on_done(rank, number) is None
    assert made.on_result("r2", result(7), [b"ab"]) == InferenceResult(result(7), [b"ab"])
    assert made.on_result("r2", result(8), [b"cd"]) == InferenceResult(result(8), [b"cd"])


def test_shares_are_joined_in_the_order_of_the_ranks() -> None:
    made = in_step(reply=None)
    assert made.on_result("r2", result(shape=(1, 2)), [b"ef"]) is None
    assert made.on_result("r0", result(shape=(2, 2)), [b"abcd"]) is None
    assert made.on_result("r1", result(shape=(0, 2)), [b""]) == InferenceResult(result(shape=(3, 2)), [b"abcdef"])


@pytest.mark.parametrize(
    ("other", "words"),
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
def test_shares_that_do_not_fit_together_are_an_error_of_the_request(other: PredictResult, words: str) -> None:
    made = in_step(reply=None)
    made.on_result("r0", result(), [b"ab"])
    made.on_result("r1", other, [b""] * len(other.description.outputs))
    outcome = made.on_result("r2", result(), [b"ab"])
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("INTERNAL", words)


@pytest.mark.parametrize("most", [5, 3])
def test_shares_that_are_too_much_together_are_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(limits, "MAX_FRAME_BYTES", most)
    made = in_step(reply=None)
    for rank in RANKS[:2]:
        assert made.on_result(rank, result(), [b"ab"]) is None
    outcome = made.on_result("r2", result(), [b"ab"])
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("RESOURCE_EXHAUSTED", f"the answer has more than {most} bytes")


def test_what_all_refuse_before_it_begins_is_an_error_of_the_request() -> None:
    made = in_step()
    assert made.on_failed("r1", refusal(code="RESOURCE_EXHAUSTED")) is None
    assert made.on_failed("r0", refusal()) is None
    outcome = made.on_failed("r2", refusal())
    assert isinstance(outcome, Rejected)
    assert (outcome.error.code, str(outcome.error)) == ("INVALID_ARGUMENT", "no")


Says = Callable[[LockstepTracker], Outcome | None]


def says(process: str, report: PredictResult | PredictFailed | int, frames: Sequence[bytes] = (b"ab",)) -> Says:
    if isinstance(report, PredictResult):
        return lambda made: made.on_result(process, report, frames)
    if isinstance(report, PredictFailed):
        return lambda made: made.on_failed(process, report)
    return lambda made: made.on_done(process, report)


@pytest.mark.parametrize(
    ("reply", "before", "last", "words"),
    [
        ("r2", says("r0", 7), says("r1", refusal()), "7 was rejected by r1 and executed by r0"),
        ("r2", says("r0", refusal()), says("r2", result()), "7 was rejected by r0 and executed by r2"),
        ("r2", says("r0", 7), says("r0", 7), "r0: for 7 expected one report, got done after done"),
        (
            "r2",
            says("r2", result()),
            says("r2", refusal()),
            "r2: for 7 expected one report, got INVALID_ARGUMENT after a result",
        ),
        ("r2", says("r0", 7), says("r1", result()), "r1: for 7 expected done, got a result"),
        ("r2", says("r0", 7), says("r2", 7), "r2: for 7 expected a result, got done"),
        (None, says("r0", result()), says("r1", 7), "r1: for 7 expected a result, got done"),
        (
            None,
            says("r0", result()),
            says("r1", result(placed=(0,)), ()),
            "r1: for 7 expected frames, got outputs in shared memory",
        ),
        ("r2", says("r0", 7), says("r1", 8), "r1: got done for 8, which was not sent to this process"),
        ("r2", says("r0", 7), says("x", 7), "x: got done for 7, which was not sent to this process"),
    ],
)
def test_who_is_not_in_step_is_not_believed(reply: str | None, before: Says, last: Says, words: str) -> None:
    made = in_step(reply)
    assert before(made) is None
    assert last(made) == OutOfStep(words)


def test_what_all_have_told_of_is_not_under_way_any_more() -> None:
    made = in_step()
    for rank in ("r0", "r1"):
        made.on_done(rank, 7)
    made.on_result("r2", result(), [b"ab"])
    assert isinstance(made.on_done("r1", 7), OutOfStep)


def test_who_replies_is_one_of_them() -> None:
    with pytest.raises(ValueError, match="reply: expected one of r0, r1, r2, got r3"):
        LockstepTracker(RANKS, "r3")
