from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from weightd.daemon.doctor.facts import host
from weightd.daemon.doctor.facts.host import Card, Host, count_processes, logic_id, look, parse_cards, processes_on

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


def no_npu_smi(argv: list[str]) -> str:
    raise OSError("npu-smi is not on PATH")


def test_a_host_with_nothing(tmp_path: Path) -> None:
    seen = look(tmp_path, no_npu_smi)
    assert seen == Host(npu_smi="npu-smi is not on PATH")
    assert not seen.has_ascend


def test_a_host_with_cards(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("davinci1", "davinci0", "davinci_manager", "null"):
        (tmp_path / "dev" / name).touch()
    write(tmp_path / "usr/local/Ascend/driver/version.info", "Version=24.1.rc3\nascendhal_version=7.35.23\n")
    seen = look(tmp_path, lambda _: MAPPING)
    assert seen.devices == ("davinci0", "davinci1")
    assert seen.driver == f"24.1.rc3 ({tmp_path}/usr/local/Ascend/driver/version.info)"
    assert seen.card(2) == Card(1, 0, 2)
    assert seen.card(3) is None
    assert seen.has_ascend
    assert seen.virtual_nodes == ()


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("cann/{machine}-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.5.0\n", "8.5.0"),
        ("ascend-toolkit/latest/{machine}-linux/ascend_toolkit_install.info", "version=8.0.RC3\n", "8.0.RC3"),
        ("latest/version.cfg", "# x\nruntime_running_version=[7.5.0.1.129:8.0.0]\n", "7.5.0.1.129:8.0.0"),
    ],
)
def test_where_cann_is(tmp_path: Path, file: str, text: str, version: str) -> None:
    path = tmp_path / "usr/local/Ascend" / file.format(machine=platform.machine())
    write(path, text)
    assert look(tmp_path, no_npu_smi).cann == f"{version} ({path})"


def test_the_environment_tells_first_where_cann_is(tmp_path: Path) -> None:
    write(tmp_path / "usr/local/Ascend/latest/version.cfg", "version=8.0.0\n")
    name = f"opt/cann/{platform.machine()}-linux/ascend_toolkit_install.info"
    write(tmp_path / name, "version=8.3.RC1\n")
    seen = look(tmp_path, no_npu_smi, "/opt/cann")
    assert (seen.cann, seen.home, seen.is_home_there) == (f"8.3.RC1 ({tmp_path}/{name})", "/opt/cann", True)
    seen = look(tmp_path, no_npu_smi, "/opt/gone")
    assert (seen.home, seen.is_home_there) == ("/opt/gone", False)


def test_the_installer_tells_where_the_driver_is_and_whose(tmp_path: Path) -> None:
    write(tmp_path / "etc/ascend_install.info", "UserName=npu\nUserGroup=npus\nDriver_Install_Path_Param=/opt/driver\n")
    write(tmp_path / "opt/driver/driver/version.info", "Version=25.2.0\n")
    seen = look(tmp_path, no_npu_smi)
    assert (seen.driver, seen.group) == (f"25.2.0 ({tmp_path}/opt/driver/driver/version.info)", "npus")


def test_a_version_file_without_a_version(tmp_path: Path) -> None:
    write(tmp_path / "usr/local/Ascend/driver/version.info", "inversion of control\n")
    assert look(tmp_path, no_npu_smi).driver == ""


@pytest.mark.parametrize(
    ("nodes", "virtual"),
    [
        (("davinci0", "davinci15"), ()),
        (("davinci100",), ("davinci100",)),  # in a container
        (("davinci0", "vdavinci100"), ("vdavinci100",)),  # on its host
        (("davinci_manager",), ()),
    ],
)
def test_virtual_nodes(nodes: tuple[str, ...], virtual: tuple[str, ...]) -> None:
    assert Host(nodes=nodes).virtual_nodes == virtual


@pytest.mark.parametrize(("flags", "virtual"), [("fpu hypervisor sse", True), ("fpu sse", False)])
def test_a_virtual_machine(tmp_path: Path, flags: str, virtual: bool) -> None:
    write(tmp_path / "proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    assert look(tmp_path, no_npu_smi).virtual_machine is virtual


def test_the_cards_that_npu_smi_lists() -> None:
    assert parse_cards(MAPPING) == (Card(0, 0, 0), Card(0, 1, 1), Card(1, 0, 2))
    assert parse_cards("no such thing") == ()


@pytest.mark.parametrize(
    ("device", "visible", "logic"),
    [(0, "", 0), (3, " ", 3), (0, "4,5", 4), (1, "4, 5", 5), (2, "4,5", None), (0, "0-3", None)],
)
def test_the_number_of_a_device_that_is_not_the_first_to_be_seen(device: int, visible: str, logic: int | None) -> None:
    assert logic_id(device, visible) == logic
    assert Host(cards=(Card(7, 1, 4),)).card(logic) == (Card(7, 1, 4) if logic == 4 else None)


def test_processes_are_counted_by_chip() -> None:
    assert count_processes(PROCESSES, 0) == 0
    assert count_processes(PROCESSES, 1) == 2
    with pytest.raises(OSError, match="no processes of chip 2"):
        count_processes(PROCESSES, 2)


def test_npu_smi_is_asked_for_the_npu_of_the_card() -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return PROCESSES

    assert processes_on(Card(7, 1, 15), run) == 2
    assert asked == [["npu-smi", "info", "-t", "proc-mem", "-i", "7"]]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["/nonexistent/npu-smi"], "is not on PATH"),
        ([sys.executable, "-c", "print('dcmi error'); raise SystemExit(255)"], "exited with status 255: dcmi error"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "did not end within 0.2 s"),
    ],
)
def test_a_command_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, argv: list[str], problem: str) -> None:
    if "sleep" in argv[-1]:
        monkeypatch.setattr(host, "_NPU_SMI_LIMIT_S", 0.2)
    with pytest.raises(OSError, match=problem):
        host.command(argv)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
