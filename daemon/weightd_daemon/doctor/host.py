"""The host under test: facts that several checks use. Each fact is read when a check first needs it.

Device nodes are inspected, but never opened, because the driver counts processes that open device nodes. The paths of
files are the defaults of the vendor's installers. In a container, any file can be missing: a container often has only
the device nodes and a few files of its host.
"""

from __future__ import annotations

import argparse
import grp
import os
import re
import stat
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.doctor import interpreter, service
from weightd_daemon.doctor.findings import CheckResult, Findings
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.doctor.selftest import sharing
from weightd_daemon.doctor.service import RunCommand, ServiceUser, SystemdUnit, run_for_output
from weightd_daemon.engines import ranktable

# Device nodes that a process needs in addition to the card: the device manager, shared virtual memory, and the channel
# between host and card.
REQUIRED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")

# Lowest number of a virtual instance's device node. The first instance of a card has the number 100 + 16 * physical id.
FIRST_VIRTUAL_ID = 100

_CARD_PATTERN = re.compile(r"(v?)davinci(\d+)")

_READ_WRITE = 0o6

# File that the driver's installer writes, and the default directory of the driver.
_INSTALL_INFO = "etc/ascend_install.info"
_DEFAULT_INSTALL_DIR = "/usr/local/Ascend"

# Version=24.1.0, version=8.0.0, runtime_running_version=[7.5.0.1.129:8.0.0]
_VERSION_PATTERN = re.compile(r"^\s*(?:\w*_)?version\s*=\s*\[?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)


class DeviceNode(NamedTuple):
    """A device node below /dev: its name, permissions, owner and group."""

    name: str
    mode: int
    uid: int
    gid: int

    @property
    def is_card(self) -> bool:
        """Whether the node is a card or a virtual instance."""
        return _CARD_PATTERN.fullmatch(self.name) is not None

    @property
    def is_virtual(self) -> bool:
        """Whether the node is a virtual instance."""
        match = _CARD_PATTERN.fullmatch(self.name)
        return match is not None and (match[1] == "v" or int(match[2]) >= FIRST_VIRTUAL_ID)

    def is_accessible_to(self, identity: ServiceUser) -> bool:
        """Return whether the permissions allow reading and writing; access control lists are ignored."""
        if identity.uid == 0:
            return True
        shift = 6 if identity.uid == self.uid else 3 if self.gid in identity.gids else 0
        return (self.mode >> shift) & _READ_WRITE == _READ_WRITE

    @property
    def group_name(self) -> str:
        """The name of the node's group; its number if the group has no name here, as in a container."""
        try:
            return grp.getgrgid(self.gid).gr_name
        except KeyError:
            return str(self.gid)

    def __str__(self) -> str:
        return f"/dev/{self.name} ({self.mode:04o}, group {self.group_name})"


class NpuInfo(NamedTuple):
    """A row of `npu-smi info -m`: the numbers of a card's NPU and chip, and the card's logical number."""

    npu_id: int
    chip_id: int
    logic_id: int


class Host:
    """The host under test.

    Args:
        options: the options of the command line.
        root: the directory below which files are searched.
        run_command: the function that runs npu-smi and systemctl.
    """

    def __init__(
        self, options: argparse.Namespace, root: Path = Path("/"), run_command: RunCommand = run_for_output
    ) -> None:
        self.options = options
        self.root = root
        self.run_command = run_command
        self.device: int = options.device

    @cached_property
    def unit(self) -> SystemdUnit | OSError:
        """The systemd unit of weightd, or the error if the unit is unavailable.

        The shell of the doctor's user may have sourced CANN's set_env.sh, but the service does not get this
        environment. So if systemd has a unit, the checks use the unit's environment, user and devices.
        """
        try:
            return service.read_unit(self.options.unit, self.root, self.run_command)
        except OSError as error:
            return error

    @cached_property
    def environment(self) -> Mapping[str, str]:
        """The environment that the checks use: the unit's, or the doctor's own without a unit."""
        return os.environ if isinstance(self.unit, OSError) else self.unit.environment

    @cached_property
    def user(self) -> ServiceUser | OSError:
        """The user whose permissions the checks use, or the error if the user is unknown."""
        return service.user_of(self.unit)

    @cached_property
    def report(self) -> InterpreterReport:
        """The report of the model's Python interpreter on its packages, libraries and cards."""
        return interpreter.run_report(self.options.python, self.device, self.options.limit, self.environment)

    @property
    def soc(self) -> str:
        """The name of the card's chip; "" if unknown."""
        return str(self.report.value("soc", "name") or "")

    @cached_property
    def nodes(self) -> tuple[DeviceNode, ...]:
        """The driver's device nodes, by name."""
        try:
            names = sorted(path.name for path in (self.root / "dev").iterdir())
        except OSError:
            return ()
        nodes: list[DeviceNode] = []
        for name in names:
            if name in REQUIRED_NODES or name.startswith(("davinci", "vdavinci")):
                status = (self.root / "dev" / name).stat()
                nodes.append(DeviceNode(name, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid))
        return tuple(nodes)

    @property
    def cards(self) -> list[DeviceNode]:
        """The device nodes of cards and of virtual instances of cards."""
        return [each for each in self.nodes if each.is_card]

    @cached_property
    def npus(self) -> tuple[NpuInfo, ...] | OSError:
        """The cards that npu-smi lists, or the error if npu-smi failed."""
        try:
            text = self.run_command(["npu-smi", "info", "-m"])
        except OSError as error:
            return error
        # The columns are NPU ID, Chip ID, Chip Logic ID and others. Rows without a logic id are skipped, because they
        # describe chips that are not NPUs.
        rows = (line.split()[:3] for line in text.splitlines())
        return tuple(NpuInfo(*map(int, row)) for row in rows if len(row) == 3 and all(cell.isdigit() for cell in row))

    def npu(self, device: int) -> NpuInfo | None:
        """Return the NPU and chip of device number `device` in this environment; None if npu-smi does not list it."""
        if isinstance(self.npus, OSError):
            return None
        card = self.card_number(device)
        return next((npu for npu in self.npus if npu.logic_id == card), None)

    def card_number(self, device: int) -> int | None:
        """Return the physical number of device number `device` in this environment; None if there is no such device."""
        return ranktable.physical_id(device, self.environment.get("ASCEND_RT_VISIBLE_DEVICES", ""))

    def count_processes(self, device: int) -> int | OSError:
        """Return the number of processes that npu-smi lists on a device, or an error if the number is unknown."""
        npu = self.npu(device)
        if npu is None:
            return self.npus if isinstance(self.npus, OSError) else OSError(f"npu-smi lists no device {device}")
        try:
            text = self.run_command(["npu-smi", "info", "-t", "proc-mem", "-i", str(npu.npu_id)])
        except OSError as error:
            return error
        # For each chip, npu-smi prints one line per process (or a line for no processes), and after these lines a line
        # with the number of the chip. So count the processes until the line of this chip.
        count = 0
        for line in text.splitlines():
            count += len(re.findall(r"Process id\s*:\s*\d+", line, re.IGNORECASE))
            end = re.match(r"\s*Chip ID\s*:\s*(\d+)", line, re.IGNORECASE)
            if end:
                if int(end.group(1)) == npu.chip_id:
                    return count
                count = 0
        return OSError(f"npu-smi lists no processes of chip {npu.chip_id}")

    @cached_property
    def install_info(self) -> Mapping[str, str]:
        """The settings that the driver's installer has written, by lower-case name, because releases differ in case."""
        try:
            lines = (self.root / _INSTALL_INFO).read_text("utf-8", "replace").splitlines()
        except OSError:
            return {}
        pairs = (line.partition("=") for line in lines if "=" in line)
        return {key.strip().lower(): value.strip() for key, _, value in pairs}

    @cached_property
    def driver(self) -> str:
        """The driver's version, with the path of its file; "" if unknown."""
        directory = self.install_info.get("driver_install_path_param", _DEFAULT_INSTALL_DIR)
        return self.read_version([f"{directory}/driver/version.info"])

    def read_version(self, files: Iterable[str]) -> str:
        """Return the first version in these files, with the path of the file; "" if no file contains a version."""
        for file in (self.root / each.lstrip("/") for each in files):
            try:
                match = _VERSION_PATTERN.search(file.read_text("utf-8", "replace"))
            except OSError:
                continue
            if match:
                return f"{match.group(1)} ({file})"
        return ""

    @cached_property
    def is_virtual_machine(self) -> bool:
        """Whether the CPU reports a hypervisor. Only x86-64 CPUs do, so other virtual machines are not detected."""
        try:
            text = (self.root / "proc/cpuinfo").read_text("utf-8", "replace")
        except OSError:
            return False
        flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
        return flags is not None and "hypervisor" in flags.group(1).split()

    @property
    def has_ascend(self) -> bool:
        """Whether there is anything of Ascend to test: a card, its driver or its library."""
        has_library = "libascendcl" in self.report.steps and not self.report.error("libascendcl")
        has_npus = not isinstance(self.npus, OSError) and bool(self.npus)
        return bool(self.cards or self.driver or has_npus or has_library or self.report.value("current_pid", "pid"))

    @cached_property
    def sharing(self) -> Findings:
        """The findings of the self-test."""
        return sharing.check_sharing(self.options, self.environment, self.report)

    def sharing_result(self, name: str) -> CheckResult:
        """Return the result of the self-test's check `name`; NOT_TESTABLE if the self-test did not reach this check."""
        return self.sharing[name].result if name in self.sharing else CheckResult.NOT_TESTABLE
