"""The verdicts on a host: what was seen and reported goes in, a finding comes out. No I/O."""

from __future__ import annotations

import re

from weightd.daemon.doctor.finding import INTERPRETER, Finding, failed, passed, untestable
from weightd.daemon.doctor.host import FIRST_VIRTUAL, Card, Host
from weightd.daemon.doctor.interpreter import Report
from weightd.protocol.version import VERSION

# The first version with weights shared between processes.
OLDEST_LIBRARY = (2, 7)

# Processes of one device that the vendor's documents allow on A2; 64 on other physical machines, 32 in virtual ones.
MAX_PROCESSES = 63

MIB = 1024 * 1024

_SOURCE_CANN = "source CANN's set_env.sh in the shell (or the service's environment) that starts weightd"
_MOUNT = "in a container, mount it from the host"
_NOWHERE = "no Ascend driver or library is here: no /dev/davinci*, no driver below /usr/local/Ascend, no libascendcl"
_ELSEWHERE = "run weightd doctor where the cards are; here weightd serves on the CPU"
NO_ASCEND = "no Ascend here"


def has_ascend(host: Host, report: Report) -> bool:
    """Whether there is anything to test."""
    loaded = "libascendcl" in report.steps and not report.error("libascendcl")
    return host.has_ascend or loaded or bool(report.value("current_pid", "pid"))


def interpreter(python: str, report: Report) -> Finding:
    """It runs, and has weightd in the version of the daemon."""
    if "python" not in report.steps:
        found = f"{python}: {report.end or 'it reported nothing'}" + (f": {report.log}" if report.log else "")
        return failed(INTERPRETER, found, f"{python} -m pip install weightd=={VERSION}; or name another with --python")
    found = f"{python}: Python {report.value('python', 'version')}"
    error = report.error("weightd")
    if error:
        return failed(INTERPRETER, f"{found}; weightd cannot run there: {error}", f"{python} -m pip install weightd")
    theirs = report.value("weightd", "version")
    if theirs != VERSION:
        found += f" has weightd {theirs}, the daemon is {VERSION}"
        return failed(INTERPRETER, found, f"{python} -m pip install weightd=={VERSION}")
    return passed(INTERPRETER, f"{found}, weightd {theirs}")


def library(report: Report) -> Finding:
    """MindSpore Lite is there, and new enough to share weights."""
    name = "mindspore_lite"
    wheel = "install the vendor's wheel of MindSpore Lite 2.7 or later, built for Ascend and for this Python"
    error = report.error("library")
    if error:
        return failed(name, error, wheel)
    version = str(report.value("library", "version"))
    numbers = _numbers(version)
    if not numbers:
        return untestable(name, f"version {version!r}", "expected numbers as in 2.7.0: see whether it is 2.7 or later")
    if numbers < OLDEST_LIBRARY:
        return failed(name, f"version {version}; weights can be shared from 2.7 on", wheel)
    return passed(name, f"version {version}")


def driver(host: Host) -> Finding:
    """The driver is installed and shows device nodes."""
    name = "driver"
    nodes = ", ".join(f"/dev/{node}" for node in host.devices) or "no /dev/davinci*"
    found = f"{nodes}; version {host.driver or 'unknown'}"
    if not host.npu_smi:
        found += f"; npu-smi lists {len(host.cards)} devices"
    if host.devices and host.driver:
        return passed(name, found)
    if host.devices:
        advice = f"read /usr/local/Ascend/driver/version.info ({_MOUNT}), or run npu-smi info"
        return untestable(name, found, advice)
    advice = f"if the next lines see no device: load the driver; {_MOUNT.replace('mount it', 'pass /dev/davinciN')}"
    return untestable(name, found, advice)


def cann(host: Host) -> Finding:
    """CANN's version; whether it fits the driver and the wheel only their release notes know."""
    if host.cann:
        return passed("cann", f"version {host.cann}")
    advice = "look for ascend_toolkit_install.info where CANN is installed; the self-test shows whether it works"
    return untestable("cann", "no version file below /usr/local/Ascend", advice)


def libascendcl(report: Report) -> Finding:
    """The runtime beneath the library can be loaded."""
    error = report.error("libascendcl")
    if error:
        return failed("libascendcl", error, _SOURCE_CANN)
    name = report.value("soc", "name")
    return passed("libascendcl", f"loaded; the chip is {name}" if name else "loaded")


def current_pid(report: Report) -> Finding:
    """The library tells the driver's number of a process: without it no process can be put on a whitelist."""
    name = "current_pid"
    error = report.error("current_pid")
    if error:
        return failed(name, error, "see the lines above")
    theirs, ours = report.value("current_pid", "pid"), report.value("python", "pid")
    if not theirs:
        found = "empty: the library cannot reach the driver"
        return failed(name, found, f"use a wheel built for Ascend, 2.7 or later; {_SOURCE_CANN}")
    if theirs == ours:
        return passed(name, f"{theirs}, the pid of the process")
    return passed(name, f"{theirs}, while the process is {ours} to itself: a pid namespace (container) lies between")


def devices(report: Report, device: int) -> Finding:
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
        return failed(name, found, advice if count else "pass the card to this container or virtual machine")
    return passed(name, found)


def memory(report: Report, device: int) -> Finding:
    """A process can take a place on the device, and there is memory."""
    name = "device memory"
    error = report.error("memory")
    if error:
        advice = f"a device takes {MAX_PROCESSES} processes: see the line processes; npu-smi info shows its health"
        return failed(name, f"ascend:{device}: {error}", advice)
    free, total = int(report.value("memory", "free_bytes")), int(report.value("memory", "total_bytes"))
    found = f"ascend:{device}: {mib(free)} free of {mib(total)}, by all processes of all users"
    if total == 0:
        return failed(name, found, "the device reports no memory: npu-smi info shows its health")
    return passed(name, found)


def processes(card: Card | None, counted: int | OSError, device: int) -> Finding:
    """There is room for more processes on the device.

    Args:
        card: where npu-smi sees it.
        counted: the processes on the device, or why npu-smi cannot tell.
        device: which one.
    """
    name = "processes"
    if isinstance(counted, OSError):
        return untestable(
            name,
            f"at most {MAX_PROCESSES} on a device; how many run now is unknown: {counted}",
            "on the host: npu-smi info -t proc-mem -i NPU_ID (a container may not see the others)",
        )
    where = f" (NPU {card.npu}, chip {card.chip})" if card else ""
    found = f"{counted} of {MAX_PROCESSES} on ascend:{device}{where}"
    if counted >= MAX_PROCESSES:
        return failed(name, found, "end some: a further process fails when it opens the device")
    return passed(name, found)


def virtual(host: Host, report: Report, *, imports: bool) -> Finding:
    """The card is no virtual instance: these refuse to share memory between processes.

    Args:
        host: its device nodes may tell.
        report: the chip's name may tell.
        imports: the self-test has imported shared memory: that settles it.
    """
    name = "virtual instance"
    if imports:
        return passed(name, "none, or one that shares: the self-test could import memory")
    advice = "use a whole card: a virtual instance (vNPU) refuses to import shared memory"
    soc = str(report.value("soc", "name") or "")
    if re.search(r"vir\d", soc, re.IGNORECASE):
        return failed(name, f"the chip calls itself {soc}", advice)
    if host.devices and set(host.devices) == set(host.virtual_nodes):
        return failed(name, f"only /dev/{', /dev/'.join(host.virtual_nodes)}", advice)
    test = "weightd doctor --model FILE.mindir tries it; on the host: npu-smi info -t info-vnpu -i NPU_ID -c CHIP_ID"
    doubt = _doubt(host)
    if doubt:
        return untestable(name, doubt, test)
    return passed(name, f"none: device nodes are below /dev/davinci{FIRST_VIRTUAL}" + (f", chip {soc}" if soc else ""))


def _doubt(host: Host) -> str:
    """Why device nodes do not tell whether a card is whole."""
    if host.virtual_nodes:
        return f"some are: /dev/{', /dev/'.join(host.virtual_nodes)}"
    if not host.devices:
        return "no device nodes to tell it from"
    return "in a virtual machine a virtual instance looks like a card" if host.virtual_machine else ""


def nowhere() -> list[Finding]:
    """What is to be said of every check where there is nothing of Ascend."""
    names = ("mindspore_lite", "driver", "cann", "libascendcl", "current_pid", "devices", "device memory")
    return [
        untestable("ascend", _NOWHERE, _ELSEWHERE),
        *(untestable(name, NO_ASCEND) for name in (*names, "processes", "virtual instance")),
    ]


def mib(size: int) -> str:
    """Return a size in bytes as people read it."""
    return f"{size / MIB:,.0f} MiB"


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, match.group().split("."))) if match else ()
