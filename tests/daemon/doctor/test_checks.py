from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.doctor import checks, cli, ranks
from weightd_daemon.doctor.findings import PROCESS_EXITS, CheckResult, passed, untestable
from weightd_daemon.doctor.host import REQUIRED_NODES, DeviceNode, NpuInfo
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.doctor.selftest import sharing
from weightd_daemon.doctor.service import ServiceUser, SystemdUnit
from weightd_daemon.platform import exit_watch
from weightd_protocol.version import VERSION

from .hosts import FAIL, GIB, OPEN, PASS, check, make_host, prints, report

ALICE = ServiceUser("alice", 1000, frozenset({1000, 1100}))
ALLOWED = ("/dev/davinci3", *(f"/dev/{name}" for name in REQUIRED_NODES))
CARD = (NpuInfo(0, 0, 0),)
DRIVER = {"usr/local/Ascend/driver/version.info": "Version=24.1.0\n"}
TOOLKIT = f"{platform.machine()}-linux/ascend_toolkit_install.info"
# Output published by users of npu-smi: a server with two chips per NPU, and a controller that is not a chip.
MAPPING = """
    NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
    0                              0                              0                              Ascend910
    0                              1                              1                              Ascend910
    0                              2                              -                              Mcu
    1                              0                              2                              Ascend910
"""
PROCESSES = """
    No process in device.
    Chip ID                        : 0

    Process id:3229095 Process name:                  Process memory(MB):48208
    Process id:3229096 Process name:python            Process memory(MB):12
    Chip ID                        : 1
"""


def nodes(*names: str, mode: int = 0o660, gid: int = 1100) -> tuple[DeviceNode, ...]:
    return tuple(DeviceNode(name, mode, 0, gid) for name in names)


def dev(mode: int = 0o660, gid: int = 1100, without: str = "") -> tuple[DeviceNode, ...]:
    return nodes(*(name for name in ("davinci0", *REQUIRED_NODES) if name != without), mode=mode, gid=gid)


def cann(version: str) -> dict[str, str]:
    return {f"usr/local/Ascend/cann/{TOOLKIT}": f"version={version}\n"}


def library(version: str) -> InterpreterReport:
    return report(library={"version": version})


def soc(name: str) -> InterpreterReport:
    return report(soc={"name": name})


def unit(**changes: Any) -> dict[str, Any]:
    return {"unit": SystemdUnit("u", **changes)}


TWO = nodes("davinci0", "davinci1")
VM = {"is_virtual_machine": True}


@pytest.mark.parametrize(
    ("name", "facts", "verdict", "texts"),
    [
        ("interpreter", {}, PASS, ["p: Python 3.9.2, weightd"]),
        (
            "interpreter",
            {"report": InterpreterReport(exit_description="died", log_tail="No module")},
            FAIL,
            ["p: died: No module", "pip install ./weightd"],
        ),
        ("interpreter", {"report": InterpreterReport()}, FAIL, ["the interpreter reported nothing"]),
        (
            "interpreter",
            {"report": report(python={"version": "3.11.2", "optimized": False})},
            PASS,
            ["Python 3.11.2", "built without --enable-optimizations, so requests take about 20 % longer"],
        ),
        (
            "interpreter",
            {"report": report(weightd="no such thing")},
            FAIL,
            ["no such thing", "-m pip install ./weightd"],
        ),
        (
            "interpreter",
            {"report": report(weightd={"version": "0.0.1"})},
            FAIL,
            ["weightd 0.0.1", f"the daemon is {VERSION}", f"./weightd, from a checkout of version {VERSION}"],
        ),
        (
            "service",
            {"unit": OSError("no systemd")},
            OPEN,
            ["no systemd: checked the environment and the user of this shell"],
        ),
        (
            "service",
            unit(environment={"ASCEND_HOME_PATH": "/c"}, user="weightd"),
            PASS,
            ["user weightd, ASCEND_HOME_PATH /c"],
        ),
        (
            "service",
            unit(allowed_devices=ALLOWED),
            PASS,
            ["checked the environment of u: user root, ASCEND_HOME_PATH not set"],
        ),
        ("service", unit(allowed_devices=("char-davinci",)), PASS, ["environment of u: "]),
        ("service", unit(hides_devices=True), FAIL, ["PrivateDevices=yes hides every card -> review the drop-in"]),
        ("service", unit(allowed_devices=ALLOWED[1:]), FAIL, ["DeviceAllow= lacks /dev/davinciN -> "]),
        ("service", unit(allowed_devices=ALLOWED[:-1]), FAIL, ["DeviceAllow= lacks /dev/hisi_hdc -> "]),
        ("service", unit(unreadable_files=("/etc/x",)), OPEN, ["/etc/x cannot be read -> run the doctor as root"]),
        ("device nodes", {"nodes": dev()}, PASS, ["alice may open /dev/davinci0 (0660, group 1100)"]),
        ("device nodes", {"nodes": dev(0o666, gid=0)}, PASS, ["alice may open"]),
        ("device nodes", {"nodes": ()}, OPEN, ["no /dev/davinciN", "docker run --device /dev/davinciN"]),
        ("device nodes", {"nodes": dev(without="devmm_svm")}, FAIL, ["no /dev/devmm_svm", "load the driver", "docker"]),
        (
            "device nodes",
            {"nodes": dev(gid=7777)},
            FAIL,
            ["alice may not open /dev/davinci0 (0660, group 7777)", "--groups 7777 alice", "--group-add 7777"],
        ),
        ("device nodes", {"nodes": dev(0o640)}, FAIL, ["may not open", "SupplementaryGroups=1100"]),
        (
            "device nodes",
            {"nodes": dev(0o640), "files": {"etc/ascend_install.info": "UserGroup=npus\n"}},
            FAIL,
            ["--groups npus alice", "SupplementaryGroups=npus", "--group-add 1100"],
        ),
        ("device nodes", {"nodes": (*dev(), *nodes("davinci1", mode=0o600))}, PASS, ["alice may open /dev/davinci0"]),
        (
            "device nodes",
            {"nodes": (*dev(without="hisi_hdc"), *nodes("hisi_hdc", mode=0o600))},
            FAIL,
            ["may not open /dev/hisi_hdc (0600"],
        ),
        ("device nodes", {"nodes": dev(0, gid=0), "user": ServiceUser("root", 0, frozenset())}, PASS, ["root may"]),
        ("device nodes", {"nodes": dev(), "user": OSError("u: no such user")}, OPEN, ["u: no such user"]),
        ("mindspore_lite", {"report": report(library="no such thing")}, FAIL, ["no such thing", "wheel"]),
        (
            "driver",
            {"nodes": TWO, "npus": CARD, "files": DRIVER},
            PASS,
            ["/dev/davinci0, /dev/davinci1; version 24.1.0 (", "npu-smi lists 1"],
        ),
        (
            "driver",
            {
                "nodes": TWO,
                "files": {
                    "etc/ascend_install.info": "Driver_Install_Path_Param=/opt/driver\n",
                    "opt/driver/driver/version.info": "Version=25.2.0\n",
                },
            },
            PASS,
            ["25.2.0"],
        ),
        ("driver", {"nodes": TWO[:1]}, OPEN, ["version unknown", "version.info"]),
        ("driver", {"nodes": (), "files": DRIVER}, OPEN, ["no /dev/davinci*", "--device /dev/davinciN"]),
        (
            "cann",
            {"files": cann("8.2.RC1")},
            PASS,
            ["8.2.RC1", "published lists name this version for MindSpore Lite 2.7.0"],
        ),
        ("cann", {}, OPEN, ["ascend_toolkit_install.info", "ASCEND_HOME_PATH is not set"]),
        (
            "cann",
            {"environment": {"ASCEND_HOME_PATH": "/gone"}, "files": cann("8.2.RC1")},
            FAIL,
            ["/gone, which does not exist", "set_env.sh"],
        ),
        (
            "cann",  # ASCEND_HOME_PATH has priority over the default directory
            {
                "environment": {"ASCEND_HOME_PATH": "/opt/cann"},
                "files": {f"opt/cann/{TOOLKIT}": "version=8.2.RC1.B1\n", **cann("8.0.0")},
            },
            PASS,
            ["version 8.2.RC1.B1 (", "ASCEND_HOME_PATH /opt/cann"],
        ),
        (
            "cann",
            {"files": cann("8.0.0"), "report": library("2.7.1")},
            OPEN,
            ["lists name 8.3.RC1 for MindSpore Lite 2.7.1"],
        ),
        ("cann", {"files": cann("9.0.0"), "report": library("3.0.0")}, PASS, ["does not know which CANN fits"]),
        ("cann", {"files": cann("9.0.0"), "report": library("")}, PASS, ["does not know which CANN fits"]),
        (
            "cann",
            {"files": {"usr/local/Ascend/latest/version.cfg": "# x\nruntime_running_version=[7.5.0.1.129:8.0.0]\n"}},
            OPEN,
            ["version 7.5.0.1.129:8.0.0"],
        ),
        ("cann", {"files": {"usr/local/Ascend/latest/version.cfg": "inversion of control"}}, OPEN, ["no version file"]),
        ("libascendcl", {}, PASS, ["Ascend910B3"]),
        ("libascendcl", {"report": report(libascendcl="no such thing")}, FAIL, ["no such thing", "set_env.sh"]),
        # An unknown name of the chip is not an error of libascendcl.
        ("libascendcl", {"report": report(soc="no such thing")}, PASS, []),
        ("current_pid", {}, PASS, ["12, the pid of the process"]),
        ("current_pid", {"report": report(current_pid={"pid": ""})}, FAIL, ["empty", "built for Ascend"]),
        ("current_pid", {"report": report(current_pid={"pid": "4711"})}, PASS, ["4711", "12", "container"]),
        ("current_pid", {"report": report(current_pid="no such thing")}, FAIL, ["no such thing"]),
        ("devices", {"device": 1}, PASS, ["devices found: 2", "ascend:1"]),
        ("devices", {"device": 2}, FAIL, ["devices found: 2", "ascend:0 to ascend:1", "ASCEND_RT_VISIBLE_DEVICES"]),
        (
            "devices",
            {"report": report(devices={"count": 0})},
            FAIL,
            ["devices found: 0", "pass the card", "docker run"],
        ),
        ("devices", {"report": report(devices="no such thing")}, FAIL, ["no such thing"]),
        ("device memory", {}, PASS, ["30,720 MiB free of 32,768 MiB"]),
        # The device cannot be opened.
        ("device memory", {"device": 3, "report": report(memory="no!")}, FAIL, ["ascend:3: no!", "63"]),
        ("device memory", {"report": report(memory={"free_bytes": 0, "total_bytes": 0})}, FAIL, ["reports no memory"]),
        (
            "device memory",
            {"report": report(memory={"free_bytes": 0, "total_bytes": GIB})},
            FAIL,
            ["0 MiB free of 1,024 MiB", "end processes that use the device"],
        ),
        ("processes", {"count": 0}, PASS, ["0 of 63"]),
        ("processes", {"count": 62}, PASS, ["62 of 63", "NPU 0, chip 0"]),
        ("processes", {"count": 63}, FAIL, ["63 of 63"]),
        ("processes", {}, OPEN, ["63", "npu-smi is not on PATH", "npu-smi info -t proc"]),
        ("processes", {"count": 31, **VM}, PASS, ["31 of 32", 'set processes = 32 in [devices."ascend:0"]']),
        ("processes", {"count": 32, **VM}, FAIL, ["32 of 32", 'set processes = 32 in [devices."ascend:0"]']),
        ("virtual instance", {"nodes": TWO}, PASS, ["below /dev/davinci100, chip Ascend910B3"]),
        ("virtual instance", {"nodes": TWO, "report": soc("Ascend310P3Vir04")}, FAIL, ["Ascend310P3Vir04"]),
        (
            "virtual instance",
            {"nodes": nodes("davinci100", "davinci_manager")},
            FAIL,
            ["only device nodes of virtual instances: /dev/davinci100"],
        ),
        (
            "virtual instance",
            {"nodes": nodes("davinci0", "vdavinci100")},
            OPEN,
            ["some device nodes are virtual instances: /dev/vdavinci100"],
        ),
        ("virtual instance", {"nodes": ()}, OPEN, ["no device nodes"]),
        ("virtual instance", {"nodes": TWO, **VM, "report": soc("")}, OPEN, ["virtual machine"]),
        # A successful import proves that the instance supports sharing.
        (
            "virtual instance",
            {"nodes": nodes("davinci100"), "sharing": {sharing.ATTACH: passed("")}},
            PASS,
            ["could import"],
        ),
    ],
)
def test_check_result_and_advice(
    tmp_path: Path, name: str, facts: dict[str, Any], verdict: CheckResult, texts: list[str]
) -> None:
    facts = dict(facts)
    if "count" in facts:
        processes = "Process id:1\n" * facts.pop("count") + "Chip ID : 0\n"
        facts.update(npus=CARD, run_command=prints(processes))
    host = make_host(tmp_path, facts.pop("files", {}), **{"user": ALICE, **facts})
    found = {**checks.INDEPENDENT_CHECKS, **checks.CHECKS}[name](host)
    check(found, verdict, *texts)
    assert bool(found.advice) is (verdict is not PASS)


@pytest.mark.parametrize(
    ("reason", "text"),
    [("", "pidfds"), ("pidfd_open: no", "a thread waits for each process, because pidfds are unavailable: pidfd_")],
)
def test_reports_how_daemon_detects_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, text: str
) -> None:
    monkeypatch.setattr(exit_watch, "unavailable_reason", lambda: reason)
    check(checks.INDEPENDENT_CHECKS[PROCESS_EXITS](make_host(tmp_path)), PASS, f"Linux {platform.release()}: {text}")


@pytest.mark.parametrize(
    ("verdict", "versions"),
    [
        (PASS, ["2.7.0", "2.7", "2.7.1rc1", "2.10.0", "3.0.0"]),
        (FAIL, ["2.6.9", "2.0.0", "1.9"]),
        (OPEN, ["unknown", ""]),
    ],
)
def test_checks_library_version(tmp_path: Path, verdict: CheckResult, versions: list[str]) -> None:
    for version in versions:
        check(checks.CHECKS["mindspore_lite"](make_host(tmp_path, report=library(version))), verdict, version)


@pytest.mark.parametrize(
    ("name", "before", "refused"),
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
def test_chip_support_depends_on_model_and_build(
    tmp_path: Path, name: str, before: CheckResult, refused: CheckResult
) -> None:
    for built, verdict in (
        (untestable(""), before),
        (passed(""), PASS),
        (untestable("")._replace(result=FAIL), refused),
    ):
        check(
            checks.CHECKS["chip"](make_host(tmp_path, report=soc(name), sharing={sharing.BUILD: built})), verdict, name
        )


NOTHING = report(libascendcl="no", current_pid={"pid": ""})


@pytest.mark.parametrize(
    ("facts", "has_ascend"),
    [
        ({"report": NOTHING}, False),
        ({"report": InterpreterReport(), "files": {"dev/davinci_manager": ""}}, False),
        ({"report": report(libascendcl="no")}, True),
        ({"report": report(current_pid={"pid": ""})}, True),
        ({"report": NOTHING, "files": {"dev/davinci0": ""}}, True),
        ({"report": NOTHING, "files": DRIVER}, True),
        ({"report": NOTHING, "npus": CARD}, True),
    ],
)
def test_detects_ascend_installation(tmp_path: Path, facts: dict[str, Any], has_ascend: bool) -> None:
    facts = dict(facts)
    assert make_host(tmp_path, facts.pop("files", {}), **facts).has_ascend is has_ascend


def test_every_check_is_reported(tmp_path: Path) -> None:
    shared = {sharing.BUILD: passed("")}
    everything = {**checks.INDEPENDENT_CHECKS, **checks.CHECKS, **ranks.CHECKS}
    assert list(cli.check_host(make_host(tmp_path, ranks=(), sharing=shared))) == [*everything, *shared]
    found = cli.check_host(make_host(tmp_path, report=NOTHING, ranks=(0, 1), model=Path("m")))
    independent = [*checks.INDEPENDENT_CHECKS]
    assert list(found) == [
        *independent, "ascend", *checks.CHECKS, *ranks.CHECKS, *sharing.CHECK_NAMES
    ]  # fmt: skip
    assert "no Ascend driver or library found" in found["ascend"].detail
    assert {each.result for name, each in found.items() if name not in independent} == {OPEN}


def test_maps_device_numbers_to_npu_smi_cards(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return MAPPING if argv[-1] == "-m" else PROCESSES

    host = make_host(tmp_path, run_command=run)
    assert host.npus == (NpuInfo(0, 0, 0), NpuInfo(0, 1, 1), NpuInfo(1, 0, 2))
    assert [host.npu(2), host.npu(3)] == [NpuInfo(1, 0, 2), None]
    assert [host.count_processes(device) for device in range(3)] == [0, 2, 0]
    assert str(host.count_processes(3)) == "npu-smi lists no device 3"
    assert [*asked[0], *asked[-1]] == ["npu-smi", "info", "-m", "npu-smi", "info", "-t", "proc-mem", "-i", "1"]
    assert make_host(tmp_path, npus=(), environment={"ASCEND_RT_VISIBLE_DEVICES": "3,1"}).card_number(0) == 3
    hidden = make_host(tmp_path, run_command=run, environment={"ASCEND_RT_VISIBLE_DEVICES": "1"})
    assert (hidden.npu(0), hidden.npu(1)) == (NpuInfo(0, 1, 1), None)
    unlisted = make_host(tmp_path, npus=(NpuInfo(7, 2, 0),), run_command=run)
    assert str(unlisted.count_processes(0)) == "npu-smi lists no processes of chip 2"
    assert make_host(tmp_path, run_command=prints("no such thing")).npus == ()


def test_finds_device_nodes(tmp_path: Path) -> None:
    assert make_host(tmp_path).nodes == ()
    (tmp_path / "dev").mkdir()
    for name in ("davinci0", "vdavinci100", "null", *REQUIRED_NODES):
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(0o640)
    seen = make_host(tmp_path).nodes
    assert [each.name for each in seen] == sorted(["davinci0", "vdavinci100", *REQUIRED_NODES])
    assert {(each.mode, each.uid) for each in seen} == {(0o640, os.getuid())}
    assert [each.name for each in seen if each.is_card] == ["davinci0", "vdavinci100"]
    assert [each.is_virtual for each in nodes("davinci15", "davinci100", "vdavinci1", "davinci_manager")] == [
        *(False, True, True, False)
    ]


@pytest.mark.parametrize(("flags", "virtual"), [("fpu hypervisor sse", True), ("fpu sse", False)])
def test_detects_virtual_machine(tmp_path: Path, flags: str, virtual: bool) -> None:
    host = make_host(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    assert host.is_virtual_machine is virtual
