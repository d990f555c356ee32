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

_NPU_SMI_LIMIT_S = 20.0

# What the driver's installer leaves, and where it puts the driver unless told otherwise.
_INSTALLED = "etc/ascend_install.info"
_INSTALLED_IN = "/usr/local/Ascend"
# By CANN's age, the newest first; {machine} as in `uname -m`.
_CANN = (
    "usr/local/Ascend/cann/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/ascend-toolkit/latest/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/nnrt/latest/{machine}-linux/ascend_nnrt_install.info",
    "usr/local/Ascend/nnae/latest/ascend_nnae_install.info",
    "usr/local/Ascend/latest/version.cfg",
)
# Version=24.1.0, version=8.0.0, runtime_running_version=[7.5.0.1.129:8.0.0]
_VERSION = re.compile(r"^\s*(?:\w*_)?version\s*=\s*\[?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)
_NODE = re.compile(r"(v?davinci)(\d+)")

# The vendor numbers virtual instances from 100: physical id * 16 + 100 and up.
FIRST_VIRTUAL = 100


@dataclass(frozen=True)
class Card:
    """A row of `npu-smi info -m`: where a logical device is."""

    npu: int
    chip: int
    logic: int


@dataclass(frozen=True)
class Host:
    """What was seen; "" or empty where there is nothing to see.

    Attributes:
        nodes: names below /dev: davinci0, vdavinci100, davinci_manager.
        driver: the driver's version, with its file.
        cann: CANN's version, with its file.
        npu_smi: "" if it could be asked, else why not.
        cards: what npu-smi lists.
        virtual_machine: the CPU says that a hypervisor runs it.
        home: ASCEND_HOME_PATH of the environment that counts.
        is_home_there: whether that directory is there.
        group: that the driver was installed for.
    """

    nodes: tuple[str, ...] = ()
    driver: str = ""
    cann: str = ""
    npu_smi: str = ""
    cards: tuple[Card, ...] = ()
    virtual_machine: bool = False
    home: str = ""
    is_home_there: bool = False
    group: str = ""

    @property
    def has_ascend(self) -> bool:
        """Whether anything of a card or its driver is there."""
        return bool(self.devices or self.driver or self.cards)

    @property
    def devices(self) -> tuple[str, ...]:
        """The nodes that are cards or virtual instances."""
        return tuple(node for node in self.nodes if _NODE.fullmatch(node))

    @property
    def virtual_nodes(self) -> tuple[str, ...]:
        """The nodes that are virtual instances."""
        return tuple(node for node in self.devices if node.startswith("v") or _number(node) >= FIRST_VIRTUAL)

    def card(self, logic: int | None) -> Card | None:
        """Return where npu-smi sees a logical device."""
        return next((card for card in self.cards if card.logic == logic), None)


Run = Callable[[list[str]], str]
"""Runs a command and returns what it prints; raises OSError with the reason if that cannot be had."""


def look(root: Path = Path("/"), run: Run | None = None, home: str = "") -> Host:
    """Look at the host below `root`; `run` asks npu-smi, `home` is ASCEND_HOME_PATH of the environment that counts."""
    installed = _installed(root / _INSTALLED)
    in_home = root / home.lstrip("/")
    names = [f"{platform.machine()}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info"]
    cann = [in_home / name for name in names] if home else []
    cann += [root / each.format(machine=platform.machine()) for each in _CANN]
    driver = Path(installed.get("driver_install_path_param", _INSTALLED_IN), "driver/version.info")
    npu_smi = ""
    cards: tuple[Card, ...] = ()
    try:
        cards = parse_cards((run or command)(["npu-smi", "info", "-m"]))
    except OSError as error:
        npu_smi = str(error)
    return Host(
        nodes=tuple(sorted(_names(root / "dev"))),
        driver=_version([root / str(driver).lstrip("/")]),
        cann=_version(cann),
        npu_smi=npu_smi,
        cards=cards,
        virtual_machine=_has_hypervisor(root / "proc/cpuinfo"),
        home=home,
        is_home_there=bool(home) and in_home.is_dir(),
        group=installed.get("usergroup", ""),
    )


def _installed(file: Path) -> dict[str, str]:
    """The assignments of the installer's file, by their names in lower case: these differ between releases."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def processes_on(card: Card, run: Run | None = None) -> int:
    """Return how many processes npu-smi lists on a card.

    Raises:
        OSError: npu-smi cannot be asked, or its answer is none that is known.
    """
    return count_processes((run or command)(["npu-smi", "info", "-t", "proc-mem", "-i", str(card.npu)]), card.chip)


def parse_cards(text: str) -> tuple[Card, ...]:
    """Read `npu-smi info -m`: NPU ID, Chip ID, Chip Logic ID, ..., where a chip that is no NPU has no logic id."""
    rows = (line.split()[:3] for line in text.splitlines())
    return tuple(Card(*map(int, row)) for row in rows if len(row) == 3 and all(cell.isdigit() for cell in row))


def count_processes(text: str, chip: int) -> int:
    """Read `npu-smi info -t proc-mem`: lines of processes, or that there is none, then the chip that they were of."""
    count = 0
    for line in text.splitlines():
        count += len(re.findall(r"Process id\s*:\s*\d+", line, re.IGNORECASE))
        end = re.match(r"\s*Chip ID\s*:\s*(\d+)", line, re.IGNORECASE)
        if end:
            if int(end.group(1)) == chip:
                return count
            count = 0
    raise OSError(f"npu-smi lists no processes of chip {chip}")


def command(argv: list[str]) -> str:
    """Run a command for what it prints.

    Raises:
        OSError: it cannot be run, fails, or takes too long.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_NPU_SMI_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(argv)} did not end within {_NPU_SMI_LIMIT_S:g} s") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        words = " ".join(text.split())[:200]
        raise OSError(f"{' '.join(argv)} exited with status {done.returncode}: {words}")
    return text


def _names(directory: Path) -> Iterable[str]:
    try:
        return [path.name for path in directory.iterdir() if path.name.startswith(("davinci", "vdavinci"))]
    except OSError:
        return []


def _version(files: Iterable[Path]) -> str:
    for file in files:
        try:
            match = _VERSION.search(file.read_text("utf-8", "replace"))
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


def _number(node: str) -> int:
    match = _NODE.fullmatch(node)
    return int(match.group(2)) if match else -1
