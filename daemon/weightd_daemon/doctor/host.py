"""The verdicts on a host: what was seen and reported goes in, a finding comes out. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weightd_daemon.doctor.access import CONTAINER_ADVICE, NODES, SERVICE
from weightd_daemon.doctor.findings import INTERPRETER, PROCESS_EXITS, Finding, failed, passed, untestable
from weightd_daemon.doctor.host_facts import FIRST_VIRTUAL_ID, HostFacts, NpuInfo
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.engines.ranktable import MAX_PROCESSES, MAX_PROCESSES_IN_VM
from weightd_daemon.platform.memory import MIB
from weightd_protocol.version import VERSION

# The first version with weights shared between processes.
MIN_LIBRARY_VERSION = (2, 7)

# What published lists name together, by MindSpore and CANN; MindSpore Lite is released with MindSpore.
_CANN_BY_MINDSPORE: Mapping[tuple[int, ...], str] = {(2, 7, 0): "8.2.RC1", (2, 7, 1): "8.3.RC1", (2, 7, 2): "8.5.0"}

# What the vendor's documents say of the calls that share, by the beginning of the chip's name.
_LISTED_CHIPS = ("Ascend910B", "Ascend910_93")
_CONTRADICTORY_CHIPS: Mapping[str, str] = {"Ascend310": "inference cards", "Ascend910": "the first training cards"}
_SOURCE_ONLY_CHIPS = ("Ascend950", "Ascend910_95")

_SOURCE_CANN_ADVICE = "source CANN's set_env.sh in the shell (or the service's environment) that starts weightd"
_MOUNT_ADVICE = "in a container, mount it from the host"
_NO_ASCEND_DETAIL = (
    "no Ascend driver or library is here: no /dev/davinci*, no driver below /usr/local/Ascend, no libascendcl"
)
_NO_ASCEND_ADVICE = "run weightd doctor where the cards are; here weightd serves on the CPU"
NO_ASCEND = "no Ascend here"

CHECK_NAMES = (
    *(SERVICE, NODES, "mindspore_lite", "driver", "cann", "libascendcl", "chip"),
    *("current_pid", "devices", "device memory", "processes", "virtual instance"),
)
"""Every check of a host but the interpreter's, in the order in which they are told."""


def has_ascend(host: HostFacts, report: InterpreterReport) -> bool:
    """Whether there is anything to test."""
    has_library = "libascendcl" in report.steps and not report.error("libascendcl")
    return host.has_ascend or has_library or bool(report.value("current_pid", "pid"))


def check_interpreter(python: str, report: InterpreterReport) -> Finding:
    """It runs, and has weightd in the version of the daemon."""
    if "python" not in report.steps:
        found = f"{python}: {report.exit_description or 'it reported nothing'}" + (
            f": {report.log_tail}" if report.log_tail else ""
        )
        return failed(INTERPRETER, found, f"{python} -m pip install weightd=={VERSION}; or name another with --python")
    found = f"{python}: Python {report.value('python', 'version')}"
    error = report.error("weightd")
    if error:
        return failed(INTERPRETER, f"{found}; weightd cannot run there: {error}", f"{python} -m pip install weightd")
    version = report.value("weightd", "version")
    if version != VERSION:
        found += f" has weightd {version}, the daemon is {VERSION}"
        return failed(INTERPRETER, found, f"{python} -m pip install weightd=={VERSION}")
    return passed(INTERPRETER, f"{found}, weightd {version}")


def check_process_exits(kernel: str, no_pidfds_reason: str) -> Finding:
    """Return by what the daemon learns that one of its processes has exited; either way is as good.

    Args:
        kernel: its release.
        no_pidfds_reason: why the daemon cannot have pidfds, "" if it can.
    """
    if no_pidfds_reason:
        return passed(
            PROCESS_EXITS, f"Linux {kernel}: a thread waits for each process, for lack of pidfds: {no_pidfds_reason}"
        )
    return passed(PROCESS_EXITS, f"Linux {kernel}: pidfds")


def check_library(report: InterpreterReport) -> Finding:
    """MindSpore Lite is there, and new enough to share weights."""
    name = "mindspore_lite"
    advice = "install the vendor's wheel of MindSpore Lite 2.7 or later, built for Ascend and for this Python"
    error = report.error("library")
    if error:
        return failed(name, error, advice)
    version = str(report.value("library", "version"))
    numbers = _parse_version(version)
    if not numbers:
        return untestable(name, f"version {version!r}", "expected numbers as in 2.7.0: see whether it is 2.7 or later")
    if numbers < MIN_LIBRARY_VERSION:
        return failed(name, f"version {version}; weights can be shared from 2.7 on", advice)
    return passed(name, f"version {version}")


def check_driver(host: HostFacts) -> Finding:
    """The driver is installed and shows device nodes."""
    name = "driver"
    nodes = ", ".join(f"/dev/{node}" for node in host.devices) or "no /dev/davinci*"
    found = f"{nodes}; version {host.driver or 'unknown'}"
    if not host.npu_smi_error:
        found += f"; npu-smi lists {len(host.cards)} devices"
    if host.devices and host.driver:
        return passed(name, found)
    if host.devices:
        advice = f"read /usr/local/Ascend/driver/version.info ({_MOUNT_ADVICE}), or run npu-smi info"
        return untestable(name, found, advice)
    return untestable(name, found, f"if the next lines see no device: load the driver; {CONTAINER_ADVICE}")


def check_cann(host: HostFacts, report: InterpreterReport) -> Finding:
    """CANN's version, and whether published lists name it with that of the library."""
    name = "cann"
    if host.ascend_home and not host.has_ascend_home_dir:
        return failed(name, f"ASCEND_HOME_PATH is {host.ascend_home}, which is not there", _SOURCE_CANN_ADVICE)
    home = f"ASCEND_HOME_PATH {host.ascend_home}" if host.ascend_home else "ASCEND_HOME_PATH is not set"
    if not host.cann:
        advice = "look for ascend_toolkit_install.info where CANN is installed; the self-test shows whether it works"
        return untestable(name, f"no version file below /usr/local/Ascend; {home}", advice)
    library = str(report.value("library", "version") or "")
    listed = _CANN_BY_MINDSPORE.get(_parse_version(library)[:3], "")
    found = f"version {host.cann}; {home}"
    if not listed or host.cann.upper().startswith(listed):
        return passed(
            name, f"{found}; " + (f"as published lists name it for {library}" if listed else "not in our list")
        )
    advice = f"the self-test shows whether they work together; listed is CANN {listed}, with the driver of its notes"
    return untestable(name, f"{found}; published lists name {listed} for {library}", advice)


def check_chip(report: InterpreterReport, *, can_share: bool | None) -> Finding:
    """What the vendor says of this kind of card; the self-test has the last word.

    Args:
        report: has the chip's name.
        can_share: whether the self-test could share; None if it has not come to that.
    """
    name = "chip"
    soc = str(report.value("soc", "name") or "")
    kind = soc or "a chip without a name"
    test = "weightd doctor --model FILE.mindir tries it"
    if can_share:
        return passed(name, f"{kind}: the self-test could share")
    if soc.startswith(_LISTED_CHIPS):
        return passed(name, f"{kind}: the vendor's documents list it for shared memory")
    doubt = next((cards for begin, cards in _CONTRADICTORY_CHIPS.items() if soc.startswith(begin)), "")
    if soc.startswith(_SOURCE_ONLY_CHIPS):
        return untestable(name, f"{kind}: listed, and known here from the driver's source only", test)
    if not doubt:
        return untestable(name, f"{kind}: nothing is known here of its kind", test)
    found = f"{kind}: the vendor's documents contradict each other on whether {doubt} can share memory"
    if can_share is None:
        return untestable(name, found, f'{test}; if it cannot, sharing = "auto" or "off"')
    return failed(name, f"{found}; here the self-test could not", 'set sharing = "auto" or "off" for models on it')


def check_libascendcl(report: InterpreterReport) -> Finding:
    """The runtime beneath the library can be loaded."""
    error = report.error("libascendcl")
    if error:
        return failed("libascendcl", error, _SOURCE_CANN_ADVICE)
    name = report.value("soc", "name")
    return passed("libascendcl", f"loaded; the chip is {name}" if name else "loaded")


def check_current_pid(report: InterpreterReport) -> Finding:
    """The library tells the driver's number of a process: without it no process can be put on a whitelist."""
    name = "current_pid"
    error = report.error("current_pid")
    if error:
        return failed(name, error, "see the lines above")
    driver_pid, process_pid = report.value("current_pid", "pid"), report.value("python", "pid")
    if not driver_pid:
        found = "empty: the library cannot reach the driver"
        return failed(name, found, f"use a wheel built for Ascend, 2.7 or later; {_SOURCE_CANN_ADVICE}")
    if driver_pid == process_pid:
        return passed(name, f"{driver_pid}, the pid of the process")
    return passed(
        name, f"{driver_pid}, while the process is {process_pid} to itself: a pid namespace (container) lies between"
    )


def check_devices(report: InterpreterReport, device: int) -> Finding:
    """The named device is there."""
    name = "devices"
    error = report.error("devices")
    if error:
        return failed(
            name, error, "npu-smi info must list the card; the driver must be loaded, this user allowed to use it"
        )
    count = int(report.value("devices", "count"))
    found = f"{count} seen; ascend:{device} is asked for"
    if device >= count:
        advice = f"name one of ascend:0 to ascend:{count - 1}; ASCEND_RT_VISIBLE_DEVICES hides and renumbers devices"
        return failed(name, found, advice if count else f"pass the card to this virtual machine; {CONTAINER_ADVICE}")
    return passed(name, found)


def check_memory(report: InterpreterReport, device: int) -> Finding:
    """A process can take a place on the device, and there is memory."""
    name = "device memory"
    error = report.error("memory")
    if error:
        advice = f"a device takes {MAX_PROCESSES} processes: see the line processes; npu-smi info shows its health"
        return failed(name, f"ascend:{device}: {error}", advice)
    free, total = int(report.value("memory", "free_bytes")), int(report.value("memory", "total_bytes"))
    found = f"ascend:{device}: {format_mib(free)} free of {format_mib(total)}, by all processes of all users"
    if total == 0:
        return failed(name, found, "the device reports no memory: npu-smi info shows its health")
    if free < MIB:
        return failed(name, found, "end what uses it: npu-smi info -t proc-mem -i NPU_ID on the host lists processes")
    return passed(name, found)


def max_processes(host: HostFacts) -> int:
    """Return how many processes a device of this host takes."""
    return MAX_PROCESSES_IN_VM if host.is_virtual_machine else MAX_PROCESSES


def check_processes(host: HostFacts, card: NpuInfo | None, process_count: int | OSError, device: int) -> Finding:
    """There is room for more processes on the device.

    Args:
        host: a virtual machine has fewer places.
        card: where npu-smi sees it.
        process_count: the processes on the device, or why npu-smi cannot tell.
        device: which one.
    """
    name = "processes"
    limit = max_processes(host)
    virtual_machine_hint = f' in a virtual machine: set processes = {limit} in [devices."ascend:{device}"]'
    limit_hint = virtual_machine_hint if host.is_virtual_machine else ""
    if isinstance(process_count, OSError):
        return untestable(
            name,
            f"at most {limit} on a device{limit_hint}; how many run now is unknown: {process_count}",
            "on the host: npu-smi info -t proc-mem -i NPU_ID (a container may not see the others)",
        )
    where = f" (NPU {card.npu_id}, chip {card.chip_id})" if card else ""
    found = f"{process_count} of {limit} on ascend:{device}{where}{limit_hint}"
    if process_count >= limit:
        return failed(name, found, "end some: a further process fails when it opens the device")
    return passed(name, found)


def check_virtual_instance(host: HostFacts, report: InterpreterReport, *, can_import: bool) -> Finding:
    """The card is no virtual instance: these refuse to share memory between processes.

    Args:
        host: its device nodes may tell.
        report: the chip's name may tell.
        can_import: the self-test has imported shared memory: that settles it.
    """
    name = "virtual instance"
    if can_import:
        return passed(name, "none, or one that shares: the self-test could import memory")
    advice = "use a whole card: a virtual instance (vNPU) refuses to import shared memory"
    soc = str(report.value("soc", "name") or "")
    if re.search(r"vir\d", soc, re.IGNORECASE):
        return failed(name, f"the chip calls itself {soc}", advice)
    if host.devices and set(host.devices) == set(host.virtual_nodes):
        return failed(name, f"only /dev/{', /dev/'.join(host.virtual_nodes)}", advice)
    test = "weightd doctor --model FILE.mindir tries it; on the host: npu-smi info -t info-vnpu -i NPU_ID -c CHIP_ID"
    doubt = _virtual_instance_doubt(host)
    if doubt:
        return untestable(name, doubt, test)
    return passed(
        name, f"none: device nodes are below /dev/davinci{FIRST_VIRTUAL_ID}" + (f", chip {soc}" if soc else "")
    )


def _virtual_instance_doubt(host: HostFacts) -> str:
    """Why device nodes do not tell whether a card is whole."""
    if host.virtual_nodes:
        return f"some are: /dev/{', /dev/'.join(host.virtual_nodes)}"
    if not host.devices:
        return "no device nodes to tell it from"
    return "in a virtual machine a virtual instance looks like a card" if host.is_virtual_machine else ""


def no_ascend_findings() -> list[Finding]:
    """What is to be said of every check where there is nothing of Ascend."""
    return [
        untestable("ascend", _NO_ASCEND_DETAIL, _NO_ASCEND_ADVICE),
        *(untestable(name, NO_ASCEND) for name in CHECK_NAMES),
    ]


def format_mib(size: int) -> str:
    """Return a size in bytes as people read it."""
    return f"{size / MIB:,.0f} MiB"


def _parse_version(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, match.group().split("."))) if match else ()
