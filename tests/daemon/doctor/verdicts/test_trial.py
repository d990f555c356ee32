from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from weightd.daemon.doctor.trial.children import ChildError, Confused, Died, Hung, Refused
from weightd.daemon.doctor.trial.trial import Trial, inputs, is_doubtful
from weightd.daemon.doctor.verdicts import trial as trial_checks
from weightd.daemon.doctor.verdicts.finding import Finding, Verdict
from weightd.daemon.doctor.verdicts.trial import ANSWER, ATTACH, BUILD, DEATH, LATER, MEMORY, NAMES, STRANGER, judge
from weightd.protocol.messages.children import Allowed, Attached, Built, DeviceMemory
from weightd.protocol.messages.data import TensorSignature

MIB = 1024 * 1024
TOTAL = 32_000 * MIB
CANARY = "c" * 64
X = TensorSignature("x", "FP32", (-1, 4))

NO_IMPORT = Refused("stranger: build with the handle: acl rt mem import from shareable handle failed! ret:507899")
OTHER = Refused("stranger: build with the handle: Acl open device 0 failed. ret = 507899")


def free(mib: int) -> DeviceMemory:
    return DeviceMemory(TOTAL, mib * MIB)


BUILT = Built("90", (X,), (X,), ({"x": (2,)},), CANARY, 1000 * MIB, "", free(30_000))
ATTACHED = Attached(CANARY, 1000 * MIB, "", free(29_700))


def trial(**changes: Any) -> Trial:
    """A self-test in which all went well on a driver that counts references, but for `changes`."""
    well = Trial(
        start={"holder": "1", "worker": "2", "late worker": "3"},
        build=BUILT,
        attach=ATTACHED,
        allow=Allowed(),
        new=ATTACHED,
        stranger=NO_IMPORT,
        before=(b"answer",),
        after=(b"answer",),
        late=ATTACHED,
    )
    return replace(well, **changes)


def finding(name: str, **changes: Any) -> Finding:
    findings = judge(trial(**changes), 31_000 * MIB)
    assert [each.name for each in findings] == list(NAMES)
    return findings[NAMES.index(name)]


def verdicts(**changes: Any) -> list[str]:
    return [each.verdict.value for each in judge(trial(**changes), None)]


def test_all_is_well() -> None:
    assert verdicts() == ["pass"] * 7


def test_the_memory_is_told_in_figures() -> None:
    found = finding(MEMORY).found
    for figure in ("31,000 MiB before", "30,000 MiB after the build", "29,700 MiB after the attach", "took 300 MiB"):
        assert figure in found
    assert "free unknown before" in judge(trial(), None)[NAMES.index(MEMORY)].found


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (Refused("aclrtMallocPhysical failed! ret:207001"), "out of memory"),
        (Refused("Acl open device 0 failed. ret = 507899"), "63"),
        (Refused("Set pid to shareable_handle failed! ret:507899"), "cannot list pids"),
        (Refused("what is that"), "native log"),
        (Died("killed by SIGSEGV"), "crashed"),
        (Hung("no answer within 5 s"), "--limit"),
    ],
)
def test_a_build_that_fails(error: ChildError, advice: str) -> None:
    build = finding(BUILD, build=error)
    assert (build.verdict, build.found) == (Verdict.FAIL, str(error))
    assert advice in build.advice
    assert verdicts(build=error) == ["fail"] + ["not testable"] * 6


def test_children_that_do_not_start() -> None:
    assert verdicts(start=Died("cannot start"), build=None) == ["fail"] + ["not testable"] * 6


def test_a_build_without_a_handle() -> None:
    build = finding(BUILD, build=replace(BUILT, handle="", note="the library gave none"))
    assert "the library gave none" in build.found
    assert verdicts(build=replace(BUILT, handle="")) == ["fail"] + ["not testable"] * 6


def test_an_attach_that_is_refused() -> None:
    attach = finding(ATTACH, attach=NO_IMPORT)
    assert attach.verdict is Verdict.FAIL
    assert "virtual instance" in attach.advice
    assert verdicts(attach=NO_IMPORT) == ["pass", "fail"] + ["not testable"] * 5


def test_answers_that_differ_or_do_not_exist() -> None:
    assert finding(ANSWER, attach=replace(ATTACHED, canary="d" * 64)).verdict is Verdict.FAIL
    none = finding(ANSWER, build=replace(BUILT, canary="", canary_note="it dreams"))
    assert none.verdict is Verdict.FAIL
    assert none.found.startswith("no canary: it dreams: nothing else shows ")


@pytest.mark.parametrize(
    ("after_attach", "after_private", "verdict"),
    [
        (29_001, None, "pass"),  # less than the weights
        (29_000, None, "not testable"),  # the weights, or something else of that size
        (28_000, 25_000, "pass"),  # a copy of its own takes 1,000 MiB more than the attach
        (28_000, 26_000, "fail"),  # no more than the attach
        (28_000, 25_501, "fail"),
        (28_000, 25_500, "pass"),
    ],
)
def test_whether_memory_is_taken_once(after_attach: int, after_private: int | None, verdict: str) -> None:
    attach = replace(ATTACHED, device=free(after_attach))
    private = None if after_private is None else Attached(CANARY, 0, "", free(after_private))
    assert is_doubtful(BUILT, attach) is (after_attach <= 29_000)
    assert finding(MEMORY, attach=attach, private=private).verdict.value == verdict


def test_memory_that_nobody_can_read() -> None:
    assert finding(MEMORY, attach=replace(ATTACHED, device=None)).verdict is Verdict.NOT_TESTABLE
    assert finding(MEMORY, build=replace(BUILT, device=None)).verdict is Verdict.NOT_TESTABLE
    assert not is_doubtful(replace(BUILT, device=None), ATTACHED)


def test_a_comparison_that_found_no_room() -> None:
    changes = {"attach": replace(ATTACHED, device=free(28_000)), "private": Refused("207001")}
    assert finding(MEMORY, **changes).verdict is Verdict.NOT_TESTABLE


def test_a_list_that_does_not_grow() -> None:
    later = finding(LATER, allow=Allowed("no such call"), new=None)
    assert later.verdict is Verdict.FAIL
    assert "no such call" in later.found
    assert "spares" in later.advice
    assert "spares" in finding(LATER, new=NO_IMPORT).advice
    assert "63" in finding(LATER, new=OTHER).advice
    assert finding(LATER, new=replace(ATTACHED, canary="d")).verdict is Verdict.FAIL
    assert finding(LATER, allow=Hung("no answer")).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("stranger", "verdict"),
    [
        (NO_IMPORT, "pass"),
        (ATTACHED, "fail"),
        (Died("killed by SIGSEGV"), "fail"),
        (Hung("no answer"), "fail"),
        (OTHER, "not testable"),
        (Confused("expected Attached"), "not testable"),
        (None, "not testable"),
    ],
)
def test_a_stranger(stranger: Any, verdict: str) -> None:
    assert finding(STRANGER, stranger=stranger).verdict.value == verdict


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, "reference-counted: the worker goes on with the same answer"),
        ({}, "could still attach"),
        ({"late": NO_IMPORT}, "could not attach any more"),
        ({"after": Refused("predict failed!")}, 'strict: the worker cannot go on, so holder_loss = "strict"'),
        ({"after": Died("killed by SIGBUS")}, "killed by SIGBUS"),
        ({"after": (b"other",)}, "strict: the worker gave another answer, without an error"),
    ],
)
def test_the_death_of_the_holder(changes: dict[str, Any], found: str) -> None:
    death = finding(DEATH, **changes)
    assert death.verdict is Verdict.PASS
    assert found in death.found


def test_a_late_worker_that_answers_otherwise() -> None:
    assert finding(DEATH, late=replace(ATTACHED, canary="d")).verdict is Verdict.FAIL


def test_a_predict_that_fails_before_the_death() -> None:
    assert finding(DEATH, before=Refused("predict failed!"), after=None).verdict is Verdict.FAIL


def test_whoever_survives_is_told() -> None:
    assert trial_checks.survivors([]) == []
    (left,) = trial_checks.survivors([7, 8])
    assert left.verdict is Verdict.FAIL
    assert "7, 8" in left.found


def test_an_input_is_made_without_numpy() -> None:
    specs, frames = inputs(
        replace(
            BUILT,
            inputs=(
                X,
                TensorSignature("h", "FP16", (2,)),
                TensorSignature("d", "FP64", ()),
                TensorSignature("i", "INT64", (3,)),
                TensorSignature("b", "BOOL", (5,)),
                TensorSignature("u", "INT8", None),
            ),
            canary_cases=({"x": (2, 4), "u": (2, 2, 2)},),
        )
    )
    assert [each.shape for each in specs] == [(2, 4), (2,), (), (3,), (5,), (2, 2, 2)]
    assert [each.nbytes for each in specs] == [len(frame) for frame in frames]
    assert struct.unpack("<8f", frames[0]) == (0.5, -0.25, 1.0, -0.75, 0.125, -1.0, 0.875, 0.5)
    assert struct.unpack("<2e", frames[1]) == (0.5, -0.25)
    assert struct.unpack("<3q", frames[3]) == (0, 1, 1)
    assert frames[4] == b"\0\1\1\0\1"
