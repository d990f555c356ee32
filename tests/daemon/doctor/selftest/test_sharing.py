"""Tests of the doctor's sharing self-test: its orders to child processes, and its findings from their replies."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import pytest

from weightd_daemon.doctor.findings import Findings
from weightd_daemon.doctor.selftest import sharing
from weightd_daemon.doctor.selftest.processes import (
    ChildError,
    ChildExited,
    ChildRejected,
    ChildTimedOut,
    ProtocolViolation,
    SelfTestProcesses,
)
from weightd_daemon.doctor.selftest.sharing import (
    ANSWER,
    ATTACH,
    BUILD,
    CHECK_NAMES,
    HOLDER_EXIT,
    LATER_WORKER,
    MEMORY,
    UNLISTED,
)
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.inference import ResponseDescription, TensorSignature
from weightd_protocol.messages.worker import (
    AnnounceSelfTest,
    Attach,
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
from weightd_protocol.messages.worker_common import (
    AllowAttach,
    AttachAllowed,
    DeviceMemory,
    SelfTestCase,
    SharingTraits,
)

M = TypeVar("M", bound=ChildMessage)

MIB = 1024 * 1024
TRIED: SelfTestCase = {"x": (1, 4)}
X = TensorSignature("x", "FP32", (-1, 2))
BUILT = Built("90", (X,), (X,), (TRIED,), "c", 100 * MIB, "", DeviceMemory(1000 * MIB, 500 * MIB))
ATTACHED = Attached("c", 100 * MIB, "", DeviceMemory(1000 * MIB, 450 * MIB))


class Scripted(SelfTestProcesses):
    """Fake child processes with a scripted reply for each message type; records all orders.

    Args:
        deaths: errors of holders that exit during the self-test `TRIED`, one for each.
        answers: replies by message type, by "name type" for one child, or by "second type" after the holder has exited.
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
            "unlisted worker Attached": ChildRejected("import from shareable handle failed!"),
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
        kind = message_type.__name__
        answer = self._answers.get(f"{name} {kind}", self._answers[kind])
        if "kill holder" in self.happened:
            answer = self._answers.get(f"second {kind}", answer)
        if isinstance(answer, ChildError):
            raise answer
        return answer, (b"answer",)

    def kill(self, name: str) -> None:
        self.happened.append(f"kill {name}")


NO_IMPORT = ChildRejected("worker: build with the handle: acl rt mem import from shareable handle failed! ret:507899")
NO_PLACE = ChildRejected("worker: build with the handle: Acl open device 0 failed. ret = 507899")
OTHER = replace(ATTACHED, selftest_digest="d" * 64)
PASS, FAIL, OPEN = "pass", "fail", "not testable"


def run(children: Scripted, free_before: int | None = 600 * MIB) -> Findings:
    findings = sharing.run_selftest(children, SelfTestSpec(), free_before)
    assert list(findings) == list(CHECK_NAMES)
    return findings


def attached(free_mib: int | None) -> Attached:
    return replace(ATTACHED, device=None if free_mib is None else DeviceMemory(1000 * MIB, free_mib * MIB))


def test_runs_all_steps_in_order() -> None:
    children = Scripted()
    assert [each.result.value for each in run(children).values()] == [PASS] * 7
    assert children.happened == [
        *("start holder", "start worker", "start late worker", "Build holder", "Attach worker"),
        *("start new worker", "AllowAttach holder", "Attach new worker", "kill new worker"),
        *("start unlisted worker", "Attach unlisted worker", "kill unlisted worker"),
        *("Ping worker", "kill holder", "Ping worker", "Attach late worker"),
    ]
    [build] = [order for _, order in children.orders if isinstance(order, Build)]
    # Engine pids of worker and late worker in the fake driver; the holder started first.
    assert build.engine_pids == ("13", "13")
    [(name, allow)] = [(name, order) for name, order in children.orders if isinstance(order, AllowAttach)]
    assert (name, len(allow.engine_pids)) == ("holder", 1)
    assert allow.engine_pids[0] not in build.engine_pids


@pytest.mark.parametrize(
    ("answers", "verdicts", "last"),
    [
        ({"worker sha256": "6" * 64}, [FAIL, *[OPEN] * 6], "start late worker"),
        ({"Built": ChildRejected("no")}, [FAIL, *[OPEN] * 6], "Build holder"),
        ({"Built": replace(BUILT, handle="")}, [FAIL, *[OPEN] * 6], "Build holder"),
        ({"worker Attached": NO_IMPORT}, [PASS, FAIL, *[OPEN] * 5], "Attach worker"),
        ({"Pong": ChildRejected("no")}, [*[PASS] * 6, FAIL], "Ping worker"),
    ],
)
def test_failed_step_skips_dependent_steps(answers: dict[str, Any], verdicts: list[str], last: str) -> None:
    children = Scripted(**answers)
    assert [each.result.value for each in run(children).values()] == verdicts
    assert children.happened[-1] == last


LIST = "AttachAllowed"
NEW, UNLISTED_ATTACH, LATE = "new worker Attached", "unlisted worker Attached", "late worker Attached"


@pytest.mark.parametrize(
    ("name", "answers", "verdict", "text"),
    [
        (BUILD, {"worker sha256": "6" * 64}, FAIL, "has changed"),
        (BUILD, {"Built": ChildRejected("failed! ret:207001")}, FAIL, "207001 -> the device is out of"),
        (BUILD, {"Built": ChildRejected("Acl open device 0 failed. ret = 507899")}, FAIL, "63"),
        (BUILD, {"Built": ChildRejected("Set pid to shareable_handle failed!")}, FAIL, "cannot list pids"),
        (BUILD, {"Built": ChildRejected("what is that")}, FAIL, "native log"),
        (BUILD, {"Built": ChildExited("killed by SIGSEGV")}, FAIL, "SIGSEGV -> the library or the driver crashed"),
        (BUILD, {"Built": ChildTimedOut("no answer within 5 s")}, FAIL, "--limit"),
        (BUILD, {"Built": replace(BUILT, handle="", note="it gave none")}, FAIL, "no handle: it gave none"),
        (ATTACH, {"worker Attached": NO_IMPORT}, FAIL, "virtual instance"),
        (ANSWER, {"worker Attached": OTHER}, FAIL, "worker dddd"),
        (
            ANSWER,
            {"Built": replace(BUILT, selftest_digest="", selftest_note="it dreams")},
            FAIL,
            "no self-test: it dreams: only a self-test ",
        ),
        (
            MEMORY,
            {},
            PASS,
            "free 600 MiB before, 500 MiB after the build, 450 MiB after the attach: the worker took 50",
        ),
        (MEMORY, {"worker Attached": attached(None)}, OPEN, "cannot be read"),
        (MEMORY, {"Built": replace(BUILT, device=None)}, OPEN, "cannot be read"),
        # The doctor could not build a private copy for comparison.
        (
            MEMORY,
            {"worker Attached": attached(400), "private worker Attached": ChildRejected("207001")},
            OPEN,
            "cannot build a private copy",
        ),
        (LATER_WORKER, {LIST: AttachAllowed("no such call")}, FAIL, "no such call -> weightd replaces lost"),
        (LATER_WORKER, {LIST: ChildTimedOut("no answer")}, FAIL, "no answer"),
        (LATER_WORKER, {NEW: NO_IMPORT}, FAIL, "spares"),
        (LATER_WORKER, {NEW: NO_PLACE}, FAIL, "63"),
        (LATER_WORKER, {NEW: OTHER}, FAIL, "its answer differs"),
        (UNLISTED, {}, PASS, "refused: "),
        (UNLISTED, {UNLISTED_ATTACH: ATTACHED}, FAIL, "has no effect"),
        (UNLISTED, {UNLISTED_ATTACH: ChildExited("killed by SIGSEGV")}, FAIL, "SIGSEGV"),
        (UNLISTED, {UNLISTED_ATTACH: ChildTimedOut("no answer")}, FAIL, "no answer"),
        (UNLISTED, {UNLISTED_ATTACH: NO_PLACE}, OPEN, "not because of its pid"),
        (UNLISTED, {UNLISTED_ATTACH: ProtocolViolation("expected Attached")}, OPEN, "not because of its pid"),
        (HOLDER_EXIT, {}, PASS, "reference-counted: the worker continues with the same answer"),
        (HOLDER_EXIT, {}, PASS, "could still attach"),
        (HOLDER_EXIT, {LATE: NO_IMPORT}, PASS, "could no longer attach"),
        (HOLDER_EXIT, {LATE: OTHER}, FAIL, "its answer differs"),
        (HOLDER_EXIT, {"Pong": ChildRejected("predict failed!")}, FAIL, "predict failed!"),
        (
            HOLDER_EXIT,
            {"second Pong": ChildExited("killed by SIGBUS")},
            PASS,
            'cannot continue, so set holder_loss = "strict" (k',
        ),
        (HOLDER_EXIT, {"second Pong": Pong("other")}, PASS, "strict: the worker gave another answer, without an error"),
    ],
)
def test_step_result_and_advice(name: str, answers: dict[str, Any], verdict: str, text: str) -> None:
    found = run(Scripted(**answers))[name]
    assert found.result.value == verdict
    assert text in f"{found.detail} -> {found.advice}"


@pytest.mark.parametrize(
    ("after_attach", "after_private", "verdict"),
    [
        (401, None, PASS),  # less than the size of the weights
        (400, None, OPEN),  # the weights, or another allocation of this size
        (300, 0, PASS),  # a private copy takes 100 MiB more than the attach
        (300, 100, FAIL),  # a private copy takes no more than the attach
        (300, 51, FAIL),
        (300, 50, PASS),
    ],
)
def test_detects_private_copy_of_weights(after_attach: int, after_private: int | None, verdict: str) -> None:
    answers: dict[str, Any] = {
        "worker Attached": attached(after_attach),
        "private worker Attached": attached(after_private),
    }
    children = Scripted(**answers)
    found = run(children, None)[MEMORY]
    assert (found.result.value, "free unknown before" in found.detail) == (verdict, True)
    copies = [(name, order.handle) for name, order in children.orders if isinstance(order, Attach)][:2]
    assert (("private worker", "") in copies) is (after_attach <= 400)
    if after_attach <= 400:
        assert children.happened.index("kill private worker") < children.happened.index("AllowAttach holder")


def test_unsupported_allow_attach_skips_attach() -> None:
    children = Scripted(AttachAllowed=AttachAllowed("no such call"))
    run(children)
    assert "Attach new worker" not in children.happened
    assert "kill new worker" in children.happened


def test_repeats_same_predict_after_holder_exit() -> None:
    children = Scripted(Built=replace(BUILT, selftest_digest=""), Attached=replace(ATTACHED, selftest_digest=""))
    assert run(children)[HOLDER_EXIT].result.value == PASS
    first, second = [order for _, order in children.orders if isinstance(order, Predict)]
    assert first == second


def test_failed_selftest_case_is_excluded_from_next_build() -> None:
    outside = ChildExited("killed by SIGKILL", ExitCause(-9))
    children = Scripted(deaths=[ChildExited("killed by SIGSEGV"), outside, ChildRejected("no")])
    built, _ = sharing.load_model(children, SelfTestSpec(), should_attach=False)
    assert built == BUILT
    builds = [order for _, order in children.orders if isinstance(order, Build)]
    assert [each.failed_cases for each in builds] == [(), (TRIED,), (TRIED,), (TRIED,)]
    assert children.happened.count("start holder") == children.happened.count("kill holder") + 1 == len(builds)
    children = Scripted(deaths=[ChildExited("killed by SIGSEGV")])
    with pytest.raises(ChildExited, match=r"^killed by SIGSEGV during the self-test with x \[1, 4\]$"):
        sharing.load_model(children, SelfTestSpec(should_search=False, cases=(TRIED,)), should_attach=False)


def test_makes_inputs_without_numpy() -> None:
    others = (("h", "FP16", (2,)), ("d", "FP64", ()), ("i", "INT64", (3,)), ("b", "BOOL", (5,)), ("u", "INT8", None))
    cases: tuple[SelfTestCase, ...] = ({"x": (2, 4), "u": (2, 2, 2)},)
    specs, frames = sharing.make_inputs(
        replace(BUILT, inputs=(X, *(TensorSignature(*each) for each in others)), selftest_cases=cases)
    )
    assert [each.shape for each in specs] == [(2, 4), (2,), (), (3,), (5,), (2, 2, 2)]
    assert [each.nbytes for each in specs] == [len(frame) for frame in frames]
    assert struct.unpack("<8f", frames[0]) == (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875, 0.5)
    assert struct.unpack("<2e", frames[1]) == (0.5, -0.25)
    assert struct.unpack("<3q", frames[3]) == (0, 1, 1)
    assert frames[4] == b"\0\1\1\0\1"
