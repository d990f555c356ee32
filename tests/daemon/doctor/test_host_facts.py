from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from weightd_daemon.doctor import host_facts
from weightd_daemon.doctor.host_facts import (
    HostFacts,
    NpuInfo,
    count_card_processes,
    parse_npu_list,
    read_host,
)

# As published by users of the tool: a server of which each NPU has two chips, and a chip that is none.
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


Machine = Callable[[Mapping[str, str]], Path]


def no_npu_smi(argv: list[str]) -> str:
    raise OSError("npu-smi is not on PATH")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Write files below the root of a machine; return the root."""

    def write(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def test_a_host_with_nothing(tmp_path: Path) -> None:
    seen = read_host(tmp_path, no_npu_smi)
    assert seen == HostFacts(npu_smi_error="npu-smi is not on PATH")
    assert not seen.has_ascend


DRIVER = "usr/local/Ascend/driver/version.info"


def test_a_host_with_cards(machine: Machine) -> None:
    nodes = {f"dev/{name}": "" for name in ("davinci1", "davinci0", "davinci_manager", "null")}
    root = machine({**nodes, DRIVER: "Version=24.1.rc3\nascendhal_version=7.35.23\n"})
    seen = read_host(root, lambda _: MAPPING)
    assert seen.devices == ("davinci0", "davinci1")
    assert seen.driver == f"24.1.rc3 ({root}/{DRIVER})"
    assert (seen.card(2), seen.card(3)) == (NpuInfo(1, 0, 2), None)
    assert (seen.has_ascend, seen.virtual_nodes) == (True, ())


TOOLKIT = f"{platform.machine()}-linux/ascend_toolkit_install.info"


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        (f"cann/{TOOLKIT}", "package_name=x\nversion=8.5.0\n", "8.5.0"),
        (f"ascend-toolkit/latest/{TOOLKIT}", "version=8.0.RC3\n", "8.0.RC3"),
        ("latest/version.cfg", "# x\nruntime_running_version=[7.5.0.1.129:8.0.0]\n", "7.5.0.1.129:8.0.0"),
    ],
)
def test_where_cann_is(machine: Machine, file: str, text: str, version: str) -> None:
    root = machine({f"usr/local/Ascend/{file}": text})
    assert read_host(root, no_npu_smi).cann == f"{version} ({root}/usr/local/Ascend/{file})"


def test_the_environment_tells_first_where_cann_is(machine: Machine) -> None:
    name = f"opt/cann/{TOOLKIT}"
    root = machine({"usr/local/Ascend/latest/version.cfg": "version=8.0.0\n", name: "version=8.3.RC1\n"})
    seen = read_host(root, no_npu_smi, "/opt/cann")
    assert (seen.cann, seen.ascend_home, seen.has_ascend_home_dir) == (f"8.3.RC1 ({root}/{name})", "/opt/cann", True)
    seen = read_host(root, no_npu_smi, "/opt/gone")
    assert (seen.ascend_home, seen.has_ascend_home_dir) == ("/opt/gone", False)


def test_the_installer_tells_where_the_driver_is_and_whose(machine: Machine) -> None:
    install = "UserName=npu\nUserGroup=npus\nDriver_Install_Path_Param=/opt/driver\n"
    file = "opt/driver/driver/version.info"
    root = machine({"etc/ascend_install.info": install, file: "Version=25.2.0\n"})
    seen = read_host(root, no_npu_smi)
    assert (seen.driver, seen.install_group) == (f"25.2.0 ({root}/{file})", "npus")


def test_a_version_file_without_a_version(machine: Machine) -> None:
    assert read_host(machine({DRIVER: "inversion of control\n"}), no_npu_smi).driver == ""


@pytest.mark.parametrize(
    ("nodes", "virtual"),
    [
        (("davinci0", "davinci15", "davinci_manager"), ()),
        (("davinci100",), ("davinci100",)),  # in a container
        (("davinci0", "vdavinci100"), ("vdavinci100",)),  # on its host
    ],
)
def test_virtual_nodes(nodes: tuple[str, ...], virtual: tuple[str, ...]) -> None:
    assert HostFacts(nodes=nodes).virtual_nodes == virtual


@pytest.mark.parametrize(("flags", "virtual"), [("fpu hypervisor sse", True), ("fpu sse", False)])
def test_a_virtual_machine(machine: Machine, flags: str, virtual: bool) -> None:
    root = machine({"proc/cpuinfo": f"processor\t: 0\nflags\t\t: {flags}\n"})
    assert read_host(root, no_npu_smi).is_virtual_machine is virtual


def test_the_cards_that_npu_smi_lists() -> None:
    assert parse_npu_list(MAPPING) == (NpuInfo(0, 0, 0), NpuInfo(0, 1, 1), NpuInfo(1, 0, 2))
    assert parse_npu_list("no such thing") == ()


@pytest.mark.parametrize("logic", [4, None])
def test_where_npu_smi_sees_a_device(logic: int | None) -> None:
    assert HostFacts(cards=(NpuInfo(7, 1, 4),)).card(logic) == (NpuInfo(7, 1, 4) if logic == 4 else None)


def test_processes_are_counted_by_chip_and_asked_for_by_npu() -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return PROCESSES

    assert [count_card_processes(NpuInfo(7, chip, 15), run) for chip in (0, 1)] == [0, 2]
    assert asked[0] == ["npu-smi", "info", "-t", "proc-mem", "-i", "7"]
    with pytest.raises(OSError, match="no processes of chip 2"):
        count_card_processes(NpuInfo(7, 2, 15), run)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["/nonexistent/npu-smi"], "is not on PATH"),
        (["/bin/sh", "-c", "echo dcmi error; exit 255"], "exited with status 255: dcmi error"),
        (["/bin/sleep", "60"], "did not end within 0.2 s"),
    ],
)
def test_a_command_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, argv: list[str], problem: str) -> None:
    if "sleep" in argv[0]:
        monkeypatch.setattr(host_facts, "_NPU_SMI_TIMEOUT_S", 0.2)
    with pytest.raises(OSError, match=problem):
        host_facts.run_for_output(argv)
