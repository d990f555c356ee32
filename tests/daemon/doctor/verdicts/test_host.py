from __future__ import annotations

from typing import Any

import pytest

from weightd.daemon.doctor.facts.host import Card, Host
from weightd.daemon.doctor.facts.interpreter import Report
from weightd.daemon.doctor.verdicts import host as checks
from weightd.daemon.doctor.verdicts.finding import Finding, Verdict
from weightd.protocol.version import VERSION

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
HOST = Host(nodes=("davinci0", "davinci1"), driver="24.1.0 (file)", cann="8.2.RC1 (file)", cards=(Card(0, 0, 0),))
VERDICT = {"pass": Verdict.PASS, "fail": Verdict.FAIL, "not testable": Verdict.NOT_TESTABLE}


def report(**steps: dict[str, Any]) -> Report:
    """A report in which some steps went otherwise."""
    return Report({**STEPS, **steps})


def check(finding: Finding, verdict: str, *texts: str) -> None:
    assert finding.verdict is VERDICT[verdict], finding
    for text in texts:
        assert text in f"{finding.found} -> {finding.advice}"
    # What has passed needs none, everything else here does.
    assert bool(finding.advice) is (finding.verdict is not Verdict.PASS)


def test_all_is_well() -> None:
    check(checks.interpreter("p", report()), "pass", "Python 3.9.2")
    check(checks.library(report()), "pass", "2.7.0")
    check(checks.driver(HOST), "pass", "/dev/davinci0, /dev/davinci1", "24.1.0", "npu-smi lists 1")
    check(checks.cann(HOST, report()), "pass", "8.2.RC1", "as published lists name it for 2.7.0")
    check(checks.chip(report(), shares=None), "pass", "Ascend910B3")
    check(checks.libascendcl(report()), "pass", "Ascend910B3")
    check(checks.current_pid(report()), "pass", "12, the pid of the process")
    check(checks.devices(report(), 1), "pass", "2 seen", "ascend:1")
    check(checks.memory(report(), 0), "pass", "30,720 MiB free of 32,768 MiB")
    check(checks.processes(HOST, Card(0, 0, 0), 62, 0), "pass", "62 of 63", "NPU 0, chip 0")
    check(checks.virtual(HOST, report(), imports=False), "pass", "Ascend910B3")


def test_an_interpreter_that_does_not_run() -> None:
    finding = checks.interpreter("/bin/x", Report(end="exited with status 1", log="No module named weightd"))
    check(finding, "fail", "/bin/x", "exited with status 1", "No module named weightd", "pip install weightd")
    check(checks.interpreter("x", Report()), "fail", "it reported nothing")


def test_an_interpreter_without_a_part_of_weightd() -> None:
    finding = checks.interpreter("x", report(weightd={"error": "No module named 'zmq'"}))
    check(finding, "fail", "No module named 'zmq'", "x -m pip install weightd")


def test_an_interpreter_with_another_weightd() -> None:
    finding = checks.interpreter("x", report(weightd={"version": "0.0.1"}))
    check(finding, "fail", "weightd 0.0.1", f"the daemon is {VERSION}", f"weightd=={VERSION}")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.7.0", "pass"),
        ("2.7", "pass"),
        ("2.7.1rc1", "pass"),
        ("2.10.0", "pass"),
        ("3.0.0", "pass"),
        ("2.6.9", "fail"),
        ("2.0.0", "fail"),
        ("1.9", "fail"),
        ("unknown", "not testable"),
        ("", "not testable"),
    ],
)
def test_the_version_of_the_library(version: str, verdict: str) -> None:
    check(checks.library(report(library={"version": version})), verdict, version)


def test_no_library() -> None:
    check(checks.library(report(library={"error": "No module named 'mindspore_lite'"})), "fail", "wheel")


def test_a_driver_that_is_only_half_there() -> None:
    check(checks.driver(Host(nodes=("davinci0",))), "not testable", "version unknown", "version.info")
    check(checks.driver(Host(driver="24.1")), "not testable", "no /dev/davinci*", "--device /dev/davinciN")


@pytest.mark.parametrize(
    ("host", "library", "verdict", "texts"),
    [
        (Host(), "2.7.0", "not testable", ["ascend_toolkit_install.info", "ASCEND_HOME_PATH is not set"]),
        (Host(home="/gone", cann="8.2.RC1"), "2.7.0", "fail", ["/gone, which is not there", "set_env.sh"]),
        (Host(home="/there", is_home_there=True, cann="8.2.RC1.B1 (f)"), "2.7.0", "pass", ["ASCEND_HOME_PATH /there"]),
        (Host(cann="8.0.0 (f)"), "2.7.1", "not testable", ["published lists name 8.3.RC1 for 2.7.1"]),
        (Host(cann="9.0.0 (f)"), "3.0.0", "pass", ["not in our list"]),
        (Host(cann="9.0.0 (f)"), "", "pass", ["not in our list"]),
    ],
)
def test_cann(host: Host, library: str, verdict: str, texts: list[str]) -> None:
    check(checks.cann(host, report(library={"version": library})), verdict, *texts)


@pytest.mark.parametrize(
    ("soc", "before", "refused"),
    [
        ("Ascend910B3", "pass", "pass"),
        ("Ascend910_9392", "pass", "pass"),
        ("Ascend310P3", "not testable", "fail"),
        ("Ascend910A", "not testable", "fail"),
        ("Ascend910ProB", "not testable", "fail"),
        ("Ascend950PR", "not testable", "not testable"),
        ("", "not testable", "not testable"),
    ],
)
def test_kinds_of_cards(soc: str, before: str, refused: str) -> None:
    seen = report(soc={"name": soc})
    for shares, verdict in ((None, before), (True, "pass"), (False, refused)):
        check(checks.chip(seen, shares=shares), verdict, soc)


def test_no_libascendcl() -> None:
    error = "libascendcl.so: cannot open shared object file"
    check(checks.libascendcl(report(libascendcl={"error": error})), "fail", error, "set_env.sh")
    # Its name for the chip is no part of the question.
    check(checks.libascendcl(report(soc={"error": "no"})), "pass")


def test_the_pid() -> None:
    check(checks.current_pid(report(current_pid={"pid": ""})), "fail", "empty", "built for Ascend")
    check(checks.current_pid(report(current_pid={"pid": "4711"})), "pass", "4711", "12", "container")
    check(checks.current_pid(report(current_pid={"error": "no library"})), "fail", "no library")


def test_a_device_that_is_not_there() -> None:
    check(checks.devices(report(), 2), "fail", "2 seen", "ascend:0 to ascend:1", "ASCEND_RT_VISIBLE_DEVICES")
    check(checks.devices(report(devices={"count": 0}), 0), "fail", "0 seen", "pass the card", "docker run")
    check(checks.devices(report(devices={"error": "507899"}), 0), "fail", "507899")


def test_a_device_that_cannot_be_opened() -> None:
    check(checks.memory(report(memory={"error": "aclrtSetDevice returned 507899"}), 3), "fail", "ascend:3", "63")
    check(checks.memory(report(memory={"free_bytes": 0, "total_bytes": 0}), 0), "fail", "0 MiB")
    check(checks.memory(report(memory={"free_bytes": 0, "total_bytes": GIB}), 0), "fail", "0 MiB free of 1,024 MiB")


@pytest.mark.parametrize(("count", "verdict"), [(0, "pass"), (62, "pass"), (63, "fail"), (70, "fail")])
def test_the_processes_of_a_device(count: int, verdict: str) -> None:
    check(checks.processes(HOST, Card(0, 0, 0), count, 0), verdict, f"{count} of 63")


@pytest.mark.parametrize(("count", "verdict"), [(31, "pass"), (32, "fail")])
def test_the_processes_of_a_device_in_a_virtual_machine(count: int, verdict: str) -> None:
    finding = checks.processes(Host(virtual_machine=True), None, count, 2)
    check(finding, verdict, f"{count} of 32", 'set processes = 32 in [devices."ascend:2"]')


def test_processes_that_cannot_be_counted() -> None:
    finding = checks.processes(HOST, Card(0, 0, 0), OSError("npu-smi is not on PATH"), 0)
    check(finding, "not testable", "63", "npu-smi is not on PATH", "npu-smi info -t proc-mem")


@pytest.mark.parametrize(
    ("host", "soc", "verdict", "text"),
    [
        (HOST, "Ascend310P3Vir04", "fail", "Ascend310P3Vir04"),
        (Host(nodes=("davinci100", "davinci_manager")), "Ascend910B3", "fail", "/dev/davinci100"),
        (Host(nodes=("davinci0", "vdavinci100")), "", "not testable", "/dev/vdavinci100"),
        (Host(), "Ascend910B3", "not testable", "no device nodes"),
        (Host(nodes=("davinci0",), virtual_machine=True), "", "not testable", "virtual machine"),
        (Host(nodes=("davinci0",)), "", "pass", "below /dev/davinci100"),
    ],
)
def test_virtual_instances(host: Host, soc: str, verdict: str, text: str) -> None:
    check(checks.virtual(host, report(soc={"name": soc}), imports=False), verdict, text)


def test_an_import_is_the_proof() -> None:
    check(checks.virtual(Host(nodes=("davinci100",)), report(), imports=True), "pass", "could import")


def test_whether_there_is_anything_of_ascend() -> None:
    nothing = report(libascendcl={"error": "no"}, current_pid={"pid": ""})
    assert not checks.has_ascend(Host(), nothing)
    assert not checks.has_ascend(Host(nodes=("davinci_manager",)), Report())
    assert checks.has_ascend(Host(), report(libascendcl={"error": "no"}))
    assert checks.has_ascend(Host(), report(current_pid={"pid": ""}))
    for host in (Host(nodes=("davinci0",)), Host(driver="24.1"), Host(cards=(Card(0, 0, 0),))):
        assert checks.has_ascend(host, nothing)


def test_off_ascend_every_check_has_a_line() -> None:
    first, *others = checks.nowhere()
    assert (first.name, "no Ascend driver or library is here" in first.found) == ("ascend", True)
    assert [each.name for each in others] == list(checks.NAMES)
    assert {each.verdict for each in (first, *others)} == {Verdict.NOT_TESTABLE}
