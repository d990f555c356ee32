"""Which orders the self-test gives, in which order; played with children that are none."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest

from weightd_daemon.doctor.selftest import weight_sharing
from weightd_daemon.doctor.selftest.processes import (
    ChildError,
    ChildExited,
    ChildRejected,
    ProtocolViolation,
    SelfTestProcesses,
)
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.inference import ResponseDescription, TensorSignature
from weightd_protocol.messages.worker import (
    AllowAttach,
    AnnounceSelfTest,
    Attach,
    AttachAllowed,
    Attached,
    Build,
    Built,
    ChildMessage,
    ChildOrder,
    Hello,
    Pong,
    Predict,
    PredictResult,
)
from weightd_protocol.messages.worker_common import DeviceMemory, SelfTestCase, SharingTraits

M = TypeVar("M", bound=ChildMessage)

MIB = 1024 * 1024
TRIED: SelfTestCase = {"x": (1, 4)}
X = TensorSignature("x", "FP32", (-1, 2))
BUILT = Built("90", (X,), (X,), (TRIED,), "c", 100 * MIB, "", DeviceMemory(1000 * MIB, 500 * MIB))
ATTACHED = Attached("c", 100 * MIB, "", DeviceMemory(1000 * MIB, 450 * MIB))


class Scripted(SelfTestProcesses):
    """Answers each type of question with what was given for it, and notes what happens.

    Args:
        deaths: of holders, each while it tries `TRIED`.
        answers: by message type; one for all, or "name kind" for one child's.
    """

    def __init__(self, deaths: Sequence[ChildError] = (), **answers: Any) -> None:
        self._deaths = list(deaths)
        self.happened: list[str] = []
        self.orders: list[tuple[str, ChildOrder]] = []
        self._answers: dict[str, Any] = {
            "Built": BUILT,
            "Attached": ATTACHED,
            "AttachAllowed": AttachAllowed(),
            "Pong": Pong("c"),
            "PredictResult": PredictResult(0, ResponseDescription("m", ())),
            "unlisted worker Attached": ChildRejected("no"),
            **answers,
        }

    def start(self, name: str) -> None:
        self.happened.append(f"start {name}")

    def send_order(self, name: str, message: ChildOrder, frames: Sequence[Any] = ()) -> None:
        self.happened.append(f"{type(message).__name__} {name}")
        self.orders.append((name, message))

    def wait_for(
        self,
        name: str,
        message_type: type[M],
        step: str,
        on_announce_selftest: Callable[[AnnounceSelfTest], None] | None = None,
    ) -> tuple[M, Sequence[Any]]:
        if message_type is Hello:
            traits = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
            sha256 = self._answers.get(f"{name} sha256", "5" * 64)
            return cast("M", Hello(f"1{len(self.happened)}", sha256, {}, traits)), ()
        if self._deaths and on_announce_selftest is not None:
            on_announce_selftest(AnnounceSelfTest((TRIED,), cast("Build", self.orders[-1][1]).failed_cases))
            raise self._deaths.pop(0)
        answer = self._answers.get(f"{name} {message_type.__name__}", self._answers[message_type.__name__])
        if isinstance(answer, ChildError):
            raise answer
        return answer, (b"answer",)

    def kill(self, name: str) -> None:
        self.happened.append(f"kill {name}")


def test_all_steps_in_their_order_and_who_is_on_the_list() -> None:
    children = Scripted()
    result = weight_sharing.run_selftest(children, SelfTestSpec())
    assert children.happened == [
        *("start holder", "start worker", "start late worker", "Build holder", "Attach worker"),
        *("start new worker", "AllowAttach holder", "Attach new worker", "kill new worker"),
        *("start unlisted worker", "Attach unlisted worker", "kill unlisted worker"),
        *("Ping worker", "kill holder", "Ping worker", "Attach late worker"),
    ]
    assert isinstance(result.unlisted_result, ChildRejected)
    assert result.answer_before_exit == result.answer_after_exit == (b"c",)
    assert result.private_copy_result is None
    assert isinstance(result.start_result, dict)
    [build] = [order for _, order in children.orders if isinstance(order, Build)]
    assert build.engine_pids == (result.start_result["worker"], result.start_result["late worker"])
    [(name, allow)] = [(name, order) for name, order in children.orders if isinstance(order, AllowAttach)]
    assert (name, len(allow.engine_pids)) == ("holder", 1)
    assert allow.engine_pids[0] not in result.start_result.values()


def test_a_doubt_is_settled_with_a_copy_that_is_not_shared() -> None:
    small = Attached("c", 100 * MIB, "", DeviceMemory(1000 * MIB, 400 * MIB))
    children = Scripted(Attached=small)
    assert weight_sharing.run_selftest(children, SelfTestSpec()).private_copy_result == small
    attaches = [(name, order.handle) for name, order in children.orders if isinstance(order, Attach)]
    assert attaches[:2] == [("worker", "90"), ("private worker", "")]
    assert children.happened.index("kill private worker") < children.happened.index("AllowAttach holder")


def test_a_model_file_that_changes_meanwhile() -> None:
    start = weight_sharing.run_selftest(
        Scripted(**cast("dict[str, Any]", {"worker sha256": "6" * 64})), SelfTestSpec()
    ).start_result
    assert isinstance(start, ProtocolViolation)
    assert "has changed" in str(start)


@pytest.mark.parametrize(
    ("answers", "last"),
    [
        ({"Built": ChildRejected("no")}, "Build holder"),
        ({"Built": replace(BUILT, handle="")}, "Build holder"),
        ({"worker Attached": ChildRejected("no")}, "Attach worker"),
        ({"worker Pong": ChildRejected("no")}, "Ping worker"),
        ({"worker sha256": "6" * 64}, "start late worker"),
    ],
)
def test_what_needs_a_step_that_failed_is_not_tried(answers: dict[str, Any], last: str) -> None:
    children = Scripted(**answers)
    weight_sharing.run_selftest(children, SelfTestSpec())
    assert children.happened[-1] == last


def test_a_list_that_does_not_grow() -> None:
    children = Scripted(AttachAllowed=AttachAllowed("no such call"))
    assert weight_sharing.run_selftest(children, SelfTestSpec()).new_worker_result is None
    assert "Attach new worker" not in children.happened


def test_the_same_question_before_and_after_the_death() -> None:
    children = Scripted(Built=replace(BUILT, selftest_digest=""), Attached=replace(ATTACHED, selftest_digest=""))
    result = weight_sharing.run_selftest(children, SelfTestSpec())
    first, second = [order for _, order in children.orders if isinstance(order, Predict)]
    assert first == second
    assert result.answer_before_exit == result.answer_after_exit == (b"answer",)


def test_a_holder_that_is_lost_in_a_try_is_followed_by_one_that_leaves_it_out() -> None:
    outside = ChildExited("killed by SIGKILL", ExitCause(-9))
    children = Scripted(deaths=[ChildExited("killed by SIGSEGV"), outside, ChildRejected("no")])
    built, _ = weight_sharing.load_model(children, SelfTestSpec(), should_attach=False)
    assert built == BUILT
    builds = [order for _, order in children.orders if isinstance(order, Build)]
    assert [each.failed_cases for each in builds] == [(), (TRIED,), (TRIED,), (TRIED,)]
    assert children.happened.count("start holder") == children.happened.count("kill holder") + 1 == len(builds)
    children = Scripted(deaths=[ChildExited("killed by SIGSEGV")])
    with pytest.raises(ChildExited, match=r"^killed by SIGSEGV; it ran the self-test, x \[1, 4\]$"):
        weight_sharing.load_model(children, SelfTestSpec(should_search=False, cases=(TRIED,)), should_attach=False)


def test_an_input_is_made_without_numpy() -> None:
    others = (("h", "FP16", (2,)), ("d", "FP64", ()), ("i", "INT64", (3,)), ("b", "BOOL", (5,)), ("u", "INT8", None))
    cases: tuple[SelfTestCase, ...] = ({"x": (2, 4), "u": (2, 2, 2)},)
    specs, frames = weight_sharing.make_inputs(
        replace(BUILT, inputs=(X, *(TensorSignature(*each) for each in others)), selftest_cases=cases)
    )
    assert [each.shape for each in specs] == [(2, 4), (2,), (), (3,), (5,), (2, 2, 2)]
    assert [each.nbytes for each in specs] == [len(frame) for frame in frames]
    assert struct.unpack("<8f", frames[0]) == (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875, 0.5)
    assert struct.unpack("<2e", frames[1]) == (0.5, -0.25)
    assert struct.unpack("<3q", frames[3]) == (0, 1, 1)
    assert frames[4] == b"\0\1\1\0\1"
