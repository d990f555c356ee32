"""What the host's files and npu-smi say of its cards. Only looks: nothing is opened that is a device.

The places are those of the vendor's installers; each can be missing in a container, to which a host gives its device
nodes and a few files only.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_NPU_SMI_TIMEOUT_S = 20.0

# What the driver's installer leaves, and where it puts the driver unless told otherwise.
_INSTALL_INFO = "etc/ascend_install.info"
_DEFAULT_INSTALL_DIR = "/usr/local/Ascend"
# By CANN's age, the newest first; {machine} as in `uname -m`.
_CANN_VERSION_FILES = (
    "usr/local/Ascend/cann/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/ascend-toolkit/latest/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/nnrt/latest/{machine}-linux/ascend_nnrt_install.info",
    "usr/local/Ascend/nnae/latest/ascend_nnae_install.info",
    "usr/local/Ascend/latest/version.cfg",
)
# Version=24.1.0, version=8.0.0, runtime_running_version=[7.5.0.1.129:8.0.0]
_VERSION_PATTERN = re.compile(r"^\s*(?:\w*_)?version\s*=\s*\[?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)
_NODE_PATTERN = re.compile(r"(v?davinci)(\d+)")

# The vendor numbers virtual instances from 100: physical id * 16 + 100 and up.
FIRST_VIRTUAL_ID = 100


@dataclass(frozen=True)
class NpuInfo:
    """A row of `npu-smi info -m`: where a logical device is."""

    npu_id: int
    chip_id: int
    logic_id: int


@dataclass(frozen=True)
class HostFacts:
    """What was seen; "" or empty where there is nothing to see.

    Attributes:
        nodes: names below /dev: davinci0, vdavinci100, davinci_manager.
        driver: the driver's version, with its file.
        cann: CANN's version, with its file.
        npu_smi_error: "" if it could be asked, else why not.
        cards: what npu-smi lists.
        is_virtual_machine: the CPU says that a hypervisor runs it.
        ascend_home: ASCEND_HOME_PATH of the environment that counts.
        has_ascend_home_dir: whether that directory is there.
        install_group: that the driver was installed for.
    """

    nodes: tuple[str, ...] = ()
    driver: str = ""
    cann: str = ""
    npu_smi_error: str = ""
    cards: tuple[NpuInfo, ...] = ()
    is_virtual_machine: bool = False
    ascend_home: str = ""
    has_ascend_home_dir: bool = False
    install_group: str = ""

    @property
    def has_ascend(self) -> bool:
        """Whether anything of a card or its driver is there."""
        return bool(self.devices or self.driver or self.cards)

    @property
    def devices(self) -> tuple[str, ...]:
        """The nodes that are cards or virtual instances."""
        return tuple(node for node in self.nodes if _NODE_PATTERN.fullmatch(node))

    @property
    def virtual_nodes(self) -> tuple[str, ...]:
        """The nodes that are virtual instances."""
        return tuple(node for node in self.devices if node.startswith("v") or _node_number(node) >= FIRST_VIRTUAL_ID)

    def card(self, logic_id: int | None) -> NpuInfo | None:
        """Return where npu-smi sees a logical device."""
        return next((card for card in self.cards if card.logic_id == logic_id), None)


RunCommand = Callable[[list[str]], str]
"""Runs a command and returns what it prints; raises OSError with the reason if that cannot be had."""


def read_host(root: Path = Path("/"), run_command: RunCommand | None = None, ascend_home: str = "") -> HostFacts:
    """Look at the host below `root`.

    `run_command` asks npu-smi, `ascend_home` is ASCEND_HOME_PATH of the environment that counts.
    """
    install_info = _read_install_info(root / _INSTALL_INFO)
    in_home = root / ascend_home.lstrip("/")
    names = [f"{platform.machine()}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info"]
    cann = [in_home / name for name in names] if ascend_home else []
    cann += [root / each.format(machine=platform.machine()) for each in _CANN_VERSION_FILES]
    driver = Path(install_info.get("driver_install_path_param", _DEFAULT_INSTALL_DIR), "driver/version.info")
    npu_smi_error = ""
    cards: tuple[NpuInfo, ...] = ()
    try:
        cards = parse_npu_list((run_command or run_for_output)(["npu-smi", "info", "-m"]))
    except OSError as error:
        npu_smi_error = str(error)
    return HostFacts(
        nodes=tuple(sorted(_device_node_names(root / "dev"))),
        driver=_read_version([root / str(driver).lstrip("/")]),
        cann=_read_version(cann),
        npu_smi_error=npu_smi_error,
        cards=cards,
        is_virtual_machine=_has_hypervisor(root / "proc/cpuinfo"),
        ascend_home=ascend_home,
        has_ascend_home_dir=bool(ascend_home) and in_home.is_dir(),
        install_group=install_info.get("usergroup", ""),
    )


def _read_install_info(file: Path) -> dict[str, str]:
    """The assignments of the installer's file, by their names in lower case: these differ between releases."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def count_card_processes(card: NpuInfo, run_command: RunCommand | None = None) -> int:
    """Return how many processes npu-smi lists on a card.

    Raises:
        OSError: npu-smi cannot be asked, or its answer is none that is known.
    """
    return parse_process_count(
        (run_command or run_for_output)(["npu-smi", "info", "-t", "proc-mem", "-i", str(card.npu_id)]), card.chip_id
    )


def parse_npu_list(text: str) -> tuple[NpuInfo, ...]:
    """Read `npu-smi info -m`: NPU ID, Chip ID, Chip Logic ID, ..., where a chip that is no NPU has no logic id."""
    rows = (line.split()[:3] for line in text.splitlines())
    return tuple(NpuInfo(*map(int, row)) for row in rows if len(row) == 3 and all(cell.isdigit() for cell in row))


def parse_process_count(text: str, chip_id: int) -> int:
    """Read `npu-smi info -t proc-mem`: lines of processes, or that there is none, then the chip that they were of."""
    count = 0
    for line in text.splitlines():
        count += len(re.findall(r"Process id\s*:\s*\d+", line, re.IGNORECASE))
        end = re.match(r"\s*Chip ID\s*:\s*(\d+)", line, re.IGNORECASE)
        if end:
            if int(end.group(1)) == chip_id:
                return count
            count = 0
    raise OSError(f"npu-smi lists no processes of chip {chip_id}")


def run_for_output(argv: list[str]) -> str:
    """Run a command for what it prints.

    Raises:
        OSError: it cannot be run, fails, or takes too long.
    """
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_NPU_SMI_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(argv)} did not end within {_NPU_SMI_TIMEOUT_S:g} s") from None
    text = result.stdout.decode("utf-8", "replace")
    if result.returncode != 0:
        excerpt = " ".join(text.split())[:200]
        raise OSError(f"{' '.join(argv)} exited with status {result.returncode}: {excerpt}")
    return text


def _device_node_names(directory: Path) -> Iterable[str]:
    try:
        return [path.name for path in directory.iterdir() if path.name.startswith(("davinci", "vdavinci"))]
    except OSError:
        return []


def _read_version(files: Iterable[Path]) -> str:
    for file in files:
        try:
            match = _VERSION_PATTERN.search(file.read_text("utf-8", "replace"))
        except OSError:
            continue
        if match:
            return f"{match.group(1)} ({file})"
    return ""


def _has_hypervisor(cpuinfo: Path) -> bool:
    """The flag is on x86-64 only: elsewhere a virtual machine looks like a real one."""
    try:
        text = cpuinfo.read_text("utf-8", "replace")
    except OSError:
        return False
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return flags is not None and "hypervisor" in flags.group(1).split()


def _node_number(node: str) -> int:
    match = _NODE_PATTERN.fullmatch(node)
    return int(match.group(2)) if match else -1
