from __future__ import annotations

from typing import Any

import pytest

from weightd_daemon.doctor import host as checks
from weightd_daemon.doctor.findings import CheckResult, Finding
from weightd_daemon.doctor.host_facts import HostFacts, NpuInfo
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_protocol.version import VERSION

GIB = 1024**3
STEPS: dict[str, dict[str, Any]] = {
    "python": {"executable": "/opt/bin/python", "version": "3.9.2", "pid": "12"},
    "weightd": {"version": VERSION},
    "library": {"version": "2.7.0"},
    "current_pid": {"pid": "12"},
    "libascendcl": {},
    "soc": {"name": "Ascend910B3"},
    "devices": {"count": 2},
    "memory": {"free_bytes": 30 * GIB, "total_bytes": 32 * GIB},
}
CARD = NpuInfo(0, 0, 0)
HOST = HostFacts(nodes=("davinci0", "davinci1"), driver="24.1.0 (file)", cann="8.2.RC1 (file)", cards=(CARD,))
GUEST = HostFacts(nodes=("davinci0",), is_virtual_machine=True)
HOME = HostFacts(ascend_home="/there", has_ascend_home_dir=True, cann="8.2.RC1.B1 (f)")
PASS, FAIL, OPEN = CheckResult.PASS, CheckResult.FAIL, CheckResult.NOT_TESTABLE


def report(**steps: dict[str, Any]) -> InterpreterReport:
    """A report in which some steps went otherwise."""
    return InterpreterReport({**STEPS, **steps})


def without(step: str, error: str = "no such thing") -> InterpreterReport:
    """A report in which a step failed."""
    return report(**{step: {"error": error}})


def cann(host: HostFacts, library: str) -> Finding:
    return checks.check_cann(host, report(library={"version": library}))


def memory(free: int, total: int) -> Finding:
    return checks.check_memory(report(memory={"free_bytes": free, "total_bytes": total}), 0)


def virtual(host: HostFacts, soc: str) -> Finding:
    return checks.check_virtual_instance(host, report(soc={"name": soc}), can_import=False)


@pytest.mark.parametrize(
    ("finding", "verdict", "texts"),
    [
        (checks.check_interpreter("p", report()), PASS, ["Python 3.9.2"]),
        (checks.check_process_exits("6.1.0", ""), PASS, ["Linux 6.1.0: pidfds"]),
        (
            checks.check_process_exits("4.19.90", "pidfd_open: no"),
            PASS,
            ["Linux 4.19.90: a thread waits", "for lack of pidfds: pidfd_open: no"],
        ),
        (
            checks.check_interpreter("x", InterpreterReport(exit_description="died", log_tail="No module")),
            FAIL,
            ["x: died", "No module", "pip install"],
        ),
        (checks.check_interpreter("x", InterpreterReport()), FAIL, ["it reported nothing"]),
        (checks.check_interpreter("x", without("weightd")), FAIL, ["no such thing", "x -m pip install weightd"]),
        (
            checks.check_interpreter("x", report(weightd={"version": "0.0.1"})),
            FAIL,
            ["weightd 0.0.1", f"the daemon is {VERSION}", f"weightd=={VERSION}"],
        ),
        (checks.check_library(without("library")), FAIL, ["no such thing", "wheel"]),
        (checks.check_driver(HOST), PASS, ["/dev/davinci0, /dev/davinci1", "24.1.0", "npu-smi lists 1"]),
        (checks.check_driver(HostFacts(nodes=("davinci0",))), OPEN, ["version unknown", "version.info"]),
        (checks.check_driver(HostFacts(driver="24.1")), OPEN, ["no /dev/davinci*", "--device /dev/davinciN"]),
        (cann(HOST, "2.7.0"), PASS, ["8.2.RC1", "as published lists name it for 2.7.0"]),
        (cann(HostFacts(), "2.7.0"), OPEN, ["ascend_toolkit_install.info", "ASCEND_HOME_PATH is not set"]),
        (
            cann(HostFacts(ascend_home="/gone", cann="8.2.RC1"), "2.7.0"),
            FAIL,
            ["/gone, which is not there", "set_env.sh"],
        ),
        (cann(HOME, "2.7.0"), PASS, ["ASCEND_HOME_PATH /there"]),
        (cann(HostFacts(cann="8.0.0 (f)"), "2.7.1"), OPEN, ["published lists name 8.3.RC1 for 2.7.1"]),
        (cann(HostFacts(cann="9.0.0 (f)"), "3.0.0"), PASS, ["not in our list"]),
        (cann(HostFacts(cann="9.0.0 (f)"), ""), PASS, ["not in our list"]),
        (checks.check_libascendcl(report()), PASS, ["Ascend910B3"]),
        (checks.check_libascendcl(without("libascendcl")), FAIL, ["no such thing", "set_env.sh"]),
        # Its name for the chip is no part of the question.
        (checks.check_libascendcl(without("soc")), PASS, []),
        (checks.check_current_pid(report()), PASS, ["12, the pid of the process"]),
        (checks.check_current_pid(report(current_pid={"pid": ""})), FAIL, ["empty", "built for Ascend"]),
        (checks.check_current_pid(report(current_pid={"pid": "4711"})), PASS, ["4711", "12", "container"]),
        (checks.check_current_pid(without("current_pid")), FAIL, ["no such thing"]),
        (checks.check_devices(report(), 1), PASS, ["2 seen", "ascend:1"]),
        (checks.check_devices(report(), 2), FAIL, ["2 seen", "ascend:0 to ascend:1", "ASCEND_RT_VISIBLE_DEVICES"]),
        (checks.check_devices(report(devices={"count": 0}), 0), FAIL, ["0 seen", "pass the card", "docker run"]),
        (checks.check_devices(without("devices"), 0), FAIL, ["no such thing"]),
        (checks.check_memory(report(), 0), PASS, ["30,720 MiB free of 32,768 MiB"]),
        # A device that cannot be opened.
        (checks.check_memory(without("memory"), 3), FAIL, ["ascend:3: no such thing", "63"]),
        (memory(0, 0), FAIL, ["0 MiB", "reports no memory"]),
        (memory(0, GIB), FAIL, ["0 MiB free of 1,024 MiB", "end what uses it"]),
        (checks.check_processes(HOST, CARD, 0, 0), PASS, ["0 of 63"]),
        (checks.check_processes(HOST, CARD, 62, 0), PASS, ["62 of 63", "NPU 0, chip 0"]),
        (checks.check_processes(HOST, CARD, 63, 0), FAIL, ["63 of 63"]),
        (
            checks.check_processes(HOST, CARD, OSError("not on PATH"), 0),
            OPEN,
            ["63", "not on PATH", "npu-smi info -t proc"],
        ),
        (checks.check_processes(GUEST, None, 31, 2), PASS, ["31 of 32", 'set processes = 32 in [devices."ascend:2"]']),
        (checks.check_processes(GUEST, None, 32, 2), FAIL, ["32 of 32", 'set processes = 32 in [devices."ascend:2"]']),
        (virtual(HOST, "Ascend910B3"), PASS, ["Ascend910B3"]),
        (virtual(HOST, "Ascend310P3Vir04"), FAIL, ["Ascend310P3Vir04"]),
        (virtual(HostFacts(nodes=("davinci100", "davinci_manager")), "Ascend910B3"), FAIL, ["/dev/davinci100"]),
        (virtual(HostFacts(nodes=("davinci0", "vdavinci100")), ""), OPEN, ["/dev/vdavinci100"]),
        (virtual(HostFacts(), "Ascend910B3"), OPEN, ["no device nodes"]),
        (virtual(GUEST, ""), OPEN, ["virtual machine"]),
        (virtual(HostFacts(nodes=("davinci0",)), ""), PASS, ["below /dev/davinci100"]),
        # An import is the proof.
        (
            checks.check_virtual_instance(HostFacts(nodes=("davinci100",)), report(), can_import=True),
            PASS,
            ["could import"],
        ),
    ],
)
def test_what_is_found_and_what_to_do(finding: Finding, verdict: CheckResult, texts: list[str]) -> None:
    assert finding.result is verdict, finding
    assert [text for text in texts if text not in f"{finding.detail} -> {finding.advice}"] == [], finding
    # What has passed needs none, everything else here does.
    assert bool(finding.advice) is (verdict is not PASS)


@pytest.mark.parametrize(
    ("verdict", "versions"),
    [
        (PASS, ["2.7.0", "2.7", "2.7.1rc1", "2.10.0", "3.0.0"]),
        (FAIL, ["2.6.9", "2.0.0", "1.9"]),
        (OPEN, ["unknown", ""]),
    ],
)
def test_the_version_of_the_library(verdict: CheckResult, versions: list[str]) -> None:
    for version in versions:
        finding = checks.check_library(report(library={"version": version}))
        assert (finding.result, version in finding.detail) == (verdict, True)


@pytest.mark.parametrize(
    ("soc", "before", "refused"),
    [
        ("Ascend910B3", PASS, PASS),
        ("Ascend910_9392", PASS, PASS),
        ("Ascend310P3", OPEN, FAIL),
        ("Ascend910A", OPEN, FAIL),
        ("Ascend910ProB", OPEN, FAIL),
        ("Ascend950PR", OPEN, OPEN),
        ("", OPEN, OPEN),
    ],
)
def test_kinds_of_cards(soc: str, before: CheckResult, refused: CheckResult) -> None:
    for shares, verdict in ((None, before), (True, PASS), (False, refused)):
        finding = checks.check_chip(report(soc={"name": soc}), can_share=shares)
        assert (finding.result, soc in finding.detail) == (verdict, True)


def test_whether_there_is_anything_of_ascend() -> None:
    nothing = report(libascendcl={"error": "no"}, current_pid={"pid": ""})
    assert not checks.has_ascend(HostFacts(), nothing)
    assert not checks.has_ascend(HostFacts(nodes=("davinci_manager",)), InterpreterReport())
    assert checks.has_ascend(HostFacts(), without("libascendcl"))
    assert checks.has_ascend(HostFacts(), report(current_pid={"pid": ""}))
    for host in (HostFacts(nodes=("davinci0",)), HostFacts(driver="24.1"), HostFacts(cards=(CARD,))):
        assert checks.has_ascend(host, nothing)


def test_off_ascend_every_check_has_a_line() -> None:
    first, *others = checks.no_ascend_findings()
    assert (first.name, "no Ascend driver or library is here" in first.detail) == ("ascend", True)
    assert [each.name for each in others] == list(checks.CHECK_NAMES)
    assert {each.result for each in (first, *others)} == {OPEN}
