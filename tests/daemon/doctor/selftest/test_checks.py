from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weightd_daemon.doctor.findings import CheckResult, Finding
from weightd_daemon.doctor.selftest import checks as selftest_checks
from weightd_daemon.doctor.selftest.checks import (
    ANSWER,
    ATTACH,
    BUILD,
    CHECK_NAMES,
    HOLDER_EXIT,
    LATER_WORKER,
    MEMORY,
    UNLISTED_WORKER,
    evaluate,
)
from weightd_daemon.doctor.selftest.processes import ChildExited, ChildRejected, ChildTimedOut, ProtocolViolation
from weightd_daemon.doctor.selftest.weight_sharing import SelfTestReport, is_sharing_doubtful
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import AttachAllowed, Attached, Built
from weightd_protocol.messages.worker_common import DeviceMemory

MIB = 1024 * 1024
DIGEST = "c" * 64
X = TensorSignature("x", "FP32", (-1, 4))

NO_IMPORT = ChildRejected(
    "unlisted worker: build with the handle: acl rt mem import from shareable handle failed! ret:507899"
)
NO_PLACE = ChildRejected("unlisted worker: build with the handle: Acl open device 0 failed. ret = 507899")


def free(mib: int) -> DeviceMemory:
    return DeviceMemory(32_000 * MIB, mib * MIB)


BUILT = Built("90", (X,), (X,), ({"x": (2,)},), DIGEST, 1000 * MIB, "", free(30_000))
ATTACHED = Attached(DIGEST, 1000 * MIB, "", free(29_700))
OTHER = replace(ATTACHED, selftest_digest="d" * 64)


def report(**changes: Any) -> SelfTestReport:
    """A self-test in which all went well on a driver that counts references, but for `changes`."""
    well = SelfTestReport(
        start_result={"holder": "1", "worker": "2", "late worker": "3"},
        build_result=BUILT,
        attach_result=ATTACHED,
        allow_result=AttachAllowed(),
        new_worker_result=ATTACHED,
        unlisted_result=NO_IMPORT,
        answer_before_exit=(b"answer",),
        answer_after_exit=(b"answer",),
        late_worker_result=ATTACHED,
    )
    return replace(well, **changes)


def finding(name: str, **changes: Any) -> Finding:
    findings = evaluate(report(**changes), 31_000 * MIB)
    assert [each.name for each in findings] == list(CHECK_NAMES)
    return findings[CHECK_NAMES.index(name)]


PASS, FAIL, OPEN = "pass", "fail", "not testable"


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [PASS] * 7),
        ({"start_result": ChildExited("cannot start"), "build_result": None}, [FAIL, *[OPEN] * 6]),
        ({"build_result": ChildRejected("no")}, [FAIL, *[OPEN] * 6]),
        ({"build_result": replace(BUILT, handle="")}, [FAIL, *[OPEN] * 6]),
        ({"attach_result": NO_IMPORT}, [PASS, FAIL, *[OPEN] * 5]),
    ],
)
def test_what_needs_a_step_that_failed_was_not_reached(changes: dict[str, Any], verdicts: list[str]) -> None:
    assert [each.result.value for each in evaluate(report(**changes), None)] == verdicts


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "text"),
    [
        (
            BUILD,
            {"build_result": ChildRejected("aclrtMallocPhysical failed! ret:207001")},
            FAIL,
            "207001 -> the device is out of",
        ),
        (BUILD, {"build_result": ChildRejected("Acl open device 0 failed. ret = 507899")}, FAIL, "63"),
        (
            BUILD,
            {"build_result": ChildRejected("Set pid to shareable_handle failed! ret:507899")},
            FAIL,
            "cannot list pids",
        ),
        (BUILD, {"build_result": ChildRejected("what is that")}, FAIL, "native log"),
        (
            BUILD,
            {"build_result": ChildExited("killed by SIGSEGV")},
            FAIL,
            "killed by SIGSEGV -> the library or the driver crashed",
        ),
        (BUILD, {"build_result": ChildTimedOut("no answer within 5 s")}, FAIL, "--limit"),
        (
            BUILD,
            {"build_result": replace(BUILT, handle="", note="the library gave none")},
            FAIL,
            "the library gave none",
        ),
        (ATTACH, {"attach_result": NO_IMPORT}, FAIL, "virtual instance"),
        (ANSWER, {"attach_result": OTHER}, FAIL, "worker dddd"),
        (
            ANSWER,
            {"build_result": replace(BUILT, selftest_digest="", selftest_note="it dreams")},
            FAIL,
            "no self-test: it dreams: nothing ",
        ),
        (MEMORY, {}, PASS, "31,000 MiB before"),
        (MEMORY, {}, PASS, "30,000 MiB after the build"),
        (MEMORY, {}, PASS, "29,700 MiB after the attach"),
        (MEMORY, {}, PASS, "took 300 MiB"),
        (MEMORY, {"attach_result": replace(ATTACHED, device=None)}, OPEN, "cannot be read"),
        (MEMORY, {"build_result": replace(BUILT, device=None)}, OPEN, "cannot be read"),
        # A comparison that found no room.
        (
            MEMORY,
            {"attach_result": replace(ATTACHED, device=free(28_000)), "private_copy_result": ChildRejected("207001")},
            OPEN,
            "",
        ),
        (
            LATER_WORKER,
            {"allow_result": AttachAllowed("no such call"), "new_worker_result": None},
            FAIL,
            "no such call",
        ),
        (LATER_WORKER, {"allow_result": AttachAllowed("no such call"), "new_worker_result": None}, FAIL, "spares"),
        (LATER_WORKER, {"allow_result": ChildTimedOut("no answer")}, FAIL, "no answer"),
        (LATER_WORKER, {"new_worker_result": NO_IMPORT}, FAIL, "spares"),
        (LATER_WORKER, {"new_worker_result": NO_PLACE}, FAIL, "63"),
        (LATER_WORKER, {"new_worker_result": OTHER}, FAIL, ""),
        (UNLISTED_WORKER, {"unlisted_result": ATTACHED}, FAIL, ""),
        (UNLISTED_WORKER, {"unlisted_result": ChildExited("killed by SIGSEGV")}, FAIL, "SIGSEGV"),
        (UNLISTED_WORKER, {"unlisted_result": ChildTimedOut("no answer")}, FAIL, "no answer"),
        (UNLISTED_WORKER, {"unlisted_result": NO_PLACE}, OPEN, ""),
        (UNLISTED_WORKER, {"unlisted_result": ProtocolViolation("expected Attached")}, OPEN, ""),
        (UNLISTED_WORKER, {"unlisted_result": None}, OPEN, ""),
        (HOLDER_EXIT, {}, PASS, "reference-counted: the worker goes on with the same answer"),
        (HOLDER_EXIT, {}, PASS, "could still attach"),
        (HOLDER_EXIT, {"late_worker_result": NO_IMPORT}, PASS, "could not attach any more"),
        (HOLDER_EXIT, {"late_worker_result": OTHER}, FAIL, ""),
        (
            HOLDER_EXIT,
            {"answer_after_exit": ChildRejected("no!")},
            PASS,
            'strict: the worker cannot go on, so holder_loss = "strict"',
        ),
        (HOLDER_EXIT, {"answer_after_exit": ChildExited("killed by SIGBUS")}, PASS, "killed by SIGBUS"),
        (
            HOLDER_EXIT,
            {"answer_after_exit": (b"other",)},
            PASS,
            "strict: the worker gave another answer, without an error",
        ),
        (
            HOLDER_EXIT,
            {"answer_before_exit": ChildRejected("predict failed!"), "answer_after_exit": None},
            FAIL,
            "predict failed!",
        ),
    ],
)
def test_what_a_step_has_shown(name: str, changes: dict[str, Any], verdict: str, text: str) -> None:
    found = finding(name, **changes)
    assert found.result.value == verdict
    assert text in f"{found.detail} -> {found.advice}"


@pytest.mark.parametrize(
    ("after_attach", "after_private", "verdict"),
    [
        (29_001, None, PASS),  # less than the weights
        (29_000, None, OPEN),  # the weights, or something else of that size
        (28_000, 25_000, PASS),  # a copy of its own takes 1,000 MiB more than the attach
        (28_000, 26_000, FAIL),  # no more than the attach
        (28_000, 25_501, FAIL),
        (28_000, 25_500, PASS),
    ],
)
def test_whether_memory_is_taken_once(after_attach: int, after_private: int | None, verdict: str) -> None:
    attach = replace(ATTACHED, device=free(after_attach))
    private = None if after_private is None else Attached(DIGEST, 0, "", free(after_private))
    assert is_sharing_doubtful(BUILT, attach) is (after_attach <= 29_000)
    assert finding(MEMORY, attach_result=attach, private_copy_result=private).result.value == verdict


def test_memory_that_nobody_can_read() -> None:
    assert not is_sharing_doubtful(replace(BUILT, device=None), ATTACHED)
    assert "free unknown before" in evaluate(report(), None)[CHECK_NAMES.index(MEMORY)].detail


def test_whoever_survives_is_told() -> None:
    assert selftest_checks.check_survivors([]) == []
    (left,) = selftest_checks.check_survivors([7, 8])
    assert (left.result, "7, 8" in left.detail) == (CheckResult.FAIL, True)
