"""Checks of a host: each inspects facts about the host and decides whether the host can share weights."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping

from weightd_daemon.doctor.findings import (
    INTERPRETER,
    PROCESS_EXITS,
    CheckResult,
    Verdict,
    failed,
    passed,
    untestable,
)
from weightd_daemon.doctor.host import FIRST_VIRTUAL_ID, REQUIRED_NODES, Host
from weightd_daemon.doctor.selftest.sharing import ATTACH, BUILD, format_mib
from weightd_daemon.doctor.service import SystemdUnit
from weightd_daemon.engines.ranktable import MAX_PROCESSES, MAX_PROCESSES_IN_VM
from weightd_daemon.platform import exit_watch
from weightd_daemon.platform.memory import MIB
from weightd_protocol.version import VERSION

Check = Callable[[Host], Verdict]

_CARD_PATTERN = re.compile(r"/dev/v?davinci\d+")

# Paths of CANN's version files in different releases, the newest release first; {machine} as in `uname -m`.
_CANN_VERSION_FILES = (
    "usr/local/Ascend/cann/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/ascend-toolkit/latest/{machine}-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/nnrt/latest/{machine}-linux/ascend_nnrt_install.info",
    "usr/local/Ascend/nnae/latest/ascend_nnae_install.info",
    "usr/local/Ascend/latest/version.cfg",
)

# The first version of MindSpore Lite that can share weights between processes.
_MIN_LIBRARY_VERSION = (2, 7)

# For each version of MindSpore Lite, the version of CANN that published lists name for the same version of MindSpore.
_CANN_BY_MINDSPORE: Mapping[tuple[int, ...], str] = {(2, 7, 0): "8.2.RC1", (2, 7, 1): "8.3.RC1", (2, 7, 2): "8.5.0"}

# Prefixes of the names of chips, in three groups: the vendor's documents list the chip as able to share memory between
# processes; the documents contradict each other on the chip; only the source code of the driver lists it.
_LISTED_CHIPS = ("Ascend910B", "Ascend910_93")
_CONTRADICTORY_CHIPS: Mapping[str, str] = {"Ascend310": "inference cards", "Ascend910": "the first training cards"}
_SOURCE_ONLY_CHIPS = ("Ascend950", "Ascend910_95")

_SOURCE_CANN_ADVICE = "source CANN's set_env.sh in the shell (or the service's environment) that starts weightd"
_MOUNT_ADVICE = "in a container, mount it from the host"
_CONTAINER_ADVICE = (
    "into a container: docker run --device /dev/davinciN "
    + " ".join(f"--device /dev/{name}" for name in REQUIRED_NODES)
    + " -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
    " --group-add GID-OF-THE-NODES; or by the Ascend Docker Runtime: -e ASCEND_VISIBLE_DEVICES=N"
)
_UNOPTIMIZED = (
    "built without --enable-optimizations, so requests take about 20 % longer; use the distribution's interpreter, or"
    " build it with this argument"
)
_DROP_IN_ADVICE = "review the drop-in weightd.service.d/ascend.conf and install it (docs/operations.md, Cards)"


def _install_hint(python: str) -> str:
    """Return the command that installs the daemon's version of weightd from a checkout: no registry has weightd."""
    return f"{python} -m pip install ./weightd, from a checkout of version {VERSION}"


def _check_interpreter(host: Host) -> Verdict:
    """Check that the interpreter runs and has the same version of weightd as the daemon."""
    python, report = host.options.python, host.report
    if "python" not in report.steps:
        found = f"{python}: {report.exit_description or 'the interpreter reported nothing'}"
        found += f": {report.log_tail}" if report.log_tail else ""
        return failed(found, f"{_install_hint(python)}; or select another interpreter with --python")
    found = f"{python}: Python {report.value('python', 'version')}"
    error = report.error("weightd")
    if error:
        return failed(f"{found}; this interpreter cannot run weightd: {error}", _install_hint(python))
    version = report.value("weightd", "version")
    if version != VERSION:
        found += f" has weightd {version}, the daemon is {VERSION}"
        return failed(found, _install_hint(python))
    found += f", weightd {version}"
    if report.value("python", "optimized") is False:
        found += f"; {_UNOPTIMIZED}"
    return passed(found)


def _check_process_exits(_: Host) -> Verdict:
    """Report how the daemon detects the exit of a process: by pidfds or by threads. Both ways are equally good."""
    reason = exit_watch.unavailable_reason()
    way = f"a thread waits for each process, because pidfds are unavailable: {reason}" if reason else "pidfds"
    return passed(f"Linux {platform.release()}: {way}")


def _check_service(host: Host) -> Verdict:
    """Report whether the checks use a service's environment or this shell's; check a service's access to cards."""
    unit = host.unit
    if isinstance(unit, OSError):
        found = f"{unit}: checked the environment and the user of this shell"
        return untestable(found, "for a service, on its host: weightd doctor --unit NAME")
    home = unit.environment.get("ASCEND_HOME_PATH", "not set")
    found = f"checked the environment of {unit.name}: user {unit.user or 'root'}, ASCEND_HOME_PATH {home}"
    if unit.hides_devices:
        return failed(f"{found}; PrivateDevices=yes hides every card", _DROP_IN_ADVICE)
    denied_nodes = _denied_nodes(unit)
    if denied_nodes:
        return failed(f"{found}; DeviceAllow= lacks {', '.join(denied_nodes)}", _DROP_IN_ADVICE)
    if unit.unreadable_files:
        return untestable(f"{found}; {', '.join(unit.unreadable_files)} cannot be read", "run the doctor as root")
    return passed(found)


def _denied_nodes(unit: SystemdUnit) -> list[str]:
    """Return the needed device nodes that the unit's DeviceAllow= lacks.

    If DeviceAllow= has a device class ("char-..."), no node counts as lacking, because the class may contain all nodes.
    """
    if unit.allowed_devices is None or any(each.startswith("char-") for each in unit.allowed_devices):
        return []
    has_card = any(_CARD_PATTERN.fullmatch(each) for each in unit.allowed_devices)
    needed = [f"/dev/{name}" for name in REQUIRED_NODES]
    return ["/dev/davinciN"] * (not has_card) + [each for each in needed if each not in unit.allowed_devices]


def _check_device_nodes(host: Host) -> Verdict:
    """Check that the driver's device nodes exist and that the user of weightd may open them."""
    cards, user = host.cards, host.user
    if not cards:
        return untestable("no /dev/davinciN", _CONTAINER_ADVICE)
    missing = [f"/dev/{name}" for name in REQUIRED_NODES if name not in {each.name for each in host.nodes}]
    if missing:
        return failed(f"no {', '.join(missing)}", f"load the driver; {_CONTAINER_ADVICE}")
    if isinstance(user, OSError):
        return untestable(
            f"cannot check whether the service may open the device nodes: {user}", "create the user of the service"
        )
    denied_nodes = [each for each in host.nodes if not each.is_card and not each.is_accessible_to(user)]
    if not any(each.is_accessible_to(user) for each in cards):
        denied_nodes = cards + denied_nodes
    if not denied_nodes:
        return passed(f"{user.name} may open {cards[0]} and {', '.join(REQUIRED_NODES)}")
    group = host.install_info.get("usergroup") or denied_nodes[0].group_name
    advice = (
        f"add {user.name} to the group: usermod --append --groups {group} {user.name}; for the service,"
        f" SupplementaryGroups={group} in the drop-in; for a container, --group-add {denied_nodes[0].gid}"
    )
    return failed(f"{user.name} may not open {', '.join(map(str, denied_nodes))}", advice)


def _check_library(host: Host) -> Verdict:
    """Check that MindSpore Lite is installed and new enough to share weights."""
    advice = "install the vendor's wheel of MindSpore Lite 2.7 or later, built for Ascend and for this Python"
    error = host.report.error("library")
    if error:
        return failed(error, advice)
    version = str(host.report.value("library", "version"))
    numbers = _parse_version(version)
    if not numbers:
        return untestable(
            f"version {version!r}", "expected a number such as 2.7.0: check by hand that the version is 2.7 or later"
        )
    if numbers < _MIN_LIBRARY_VERSION:
        return failed(f"version {version}; sharing weights needs 2.7 or later", advice)
    return passed(f"version {version}")


def _check_driver(host: Host) -> Verdict:
    """Check that the driver is installed and has created device nodes."""
    nodes = ", ".join(f"/dev/{each.name}" for each in host.cards) or "no /dev/davinci*"
    found = f"{nodes}; version {host.driver or 'unknown'}"
    if not isinstance(host.npus, OSError):
        found += f"; npu-smi lists {len(host.npus)} devices"
    if not host.cards:
        return untestable(found, f"if the following checks find no device, load the driver; {_CONTAINER_ADVICE}")
    if not host.driver:
        advice = f"read /usr/local/Ascend/driver/version.info ({_MOUNT_ADVICE}), or run npu-smi info"
        return untestable(found, advice)
    return passed(found)


def _check_cann(host: Host) -> Verdict:
    """Check whether published lists name the version of CANN together with the version of MindSpore Lite."""
    home, machine = host.environment.get("ASCEND_HOME_PATH", ""), platform.machine()
    if home and not (host.root / home.lstrip("/")).is_dir():
        return failed(f"ASCEND_HOME_PATH is {home}, which does not exist", _SOURCE_CANN_ADVICE)
    in_home = [f"{machine}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info"] if home else []
    cann = host.read_version(
        [*(f"{home}/{name}" for name in in_home), *(each.format(machine=machine) for each in _CANN_VERSION_FILES)]
    )
    home = f"ASCEND_HOME_PATH {home}" if home else "ASCEND_HOME_PATH is not set"
    if not cann:
        advice = "look for ascend_toolkit_install.info where CANN is installed; the self-test shows whether CANN works"
        return untestable(f"no version file below /usr/local/Ascend; {home}", advice)
    library = str(host.report.value("library", "version") or "")
    listed = _CANN_BY_MINDSPORE.get(_parse_version(library)[:3], "")
    found = f"version {cann}; {home}"
    if not listed:
        return passed(
            f"{found}; weightd does not know which CANN fits MindSpore Lite {library or 'of unknown version'}"
        )
    if cann.upper().startswith(listed):
        return passed(f"{found}; published lists name this version for MindSpore Lite {library}")
    advice = (
        f"the self-test shows whether both work together; the listed combination is CANN {listed} and the driver of its"
        " release notes"
    )
    return untestable(f"{found}; published lists name {listed} for MindSpore Lite {library}", advice)


def _check_libascendcl(host: Host) -> Verdict:
    """Check that CANN's runtime library, which MindSpore Lite uses, can be loaded."""
    error = host.report.error("libascendcl")
    if error:
        return failed(error, _SOURCE_CANN_ADVICE)
    return passed(f"loaded; the chip is {host.soc}" if host.soc else "loaded")


def _check_chip(host: Host) -> Verdict:
    """Check whether this kind of card can share memory, by the self-test if it ran, else by the vendor's documents."""
    soc, shared = host.soc, host.sharing_result(BUILD)
    kind = soc or "chip of unknown name"
    test = "test it with weightd doctor --model FILE.mindir"
    if shared is CheckResult.PASS:
        return passed(f"{kind}: the self-test shared weights")
    if soc.startswith(_LISTED_CHIPS):
        return passed(f"{kind}: the vendor's documents list it as able to share memory")
    doubt = next((cards for begin, cards in _CONTRADICTORY_CHIPS.items() if soc.startswith(begin)), "")
    if soc.startswith(_SOURCE_ONLY_CHIPS):
        return untestable(f"{kind}: only the driver's source lists it as able to share memory", test)
    if not doubt:
        return untestable(f"{kind}: whether it can share memory is unknown", test)
    found = f"{kind}: the vendor's documents contradict each other on whether {doubt} can share memory"
    if shared is CheckResult.NOT_TESTABLE:
        return untestable(found, f'{test}; if it fails, set sharing = "auto" or "off"')
    return failed(
        f"{found}; the self-test could not share weights on this host", 'set sharing = "auto" or "off" for models on it'
    )


def _check_current_pid(host: Host) -> Verdict:
    """Check that the library reports the driver's number for a process: the driver permits sharing by this number."""
    error = host.report.error("current_pid")
    if error:
        return failed(error, "see the lines above")
    driver_pid, process_pid = host.report.value("current_pid", "pid"), host.report.value("python", "pid")
    if not driver_pid:
        found = "empty: the library cannot reach the driver"
        return failed(found, f"use a wheel built for Ascend, 2.7 or later; {_SOURCE_CANN_ADVICE}")
    if driver_pid == process_pid:
        return passed(f"{driver_pid}, the pid of the process")
    return passed(
        f"{driver_pid}; the process's own pid is {process_pid}, because it runs in a pid namespace (container)"
    )


def _check_devices(host: Host) -> Verdict:
    """Check that the selected device exists."""
    error = host.report.error("devices")
    if error:
        return failed(
            error, "load the driver, check that npu-smi info lists the card and that this user may open its device node"
        )
    count = int(host.report.value("devices", "count"))
    found = f"devices found: {count}; the checked device is ascend:{host.device}"
    if host.device < count:
        return passed(found)
    if not count:
        return failed(found, f"pass the card to this virtual machine; {_CONTAINER_ADVICE}")
    return failed(
        found, f"select one of ascend:0 to ascend:{count - 1}; ASCEND_RT_VISIBLE_DEVICES hides and renumbers devices"
    )


def _check_memory(host: Host) -> Verdict:
    """Check that a process can open the device and that memory is free."""
    error = host.report.error("memory")
    if error:
        advice = f"a device accepts {MAX_PROCESSES} processes: see the check processes; npu-smi info shows its health"
        return failed(f"ascend:{host.device}: {error}", advice)
    free, total = (int(host.report.value("memory", name)) for name in ("free_bytes", "total_bytes"))
    found = f"ascend:{host.device}: {format_mib(free)} free of {format_mib(total)}, by all processes of all users"
    if total == 0:
        return failed(found, "the device reports no memory: npu-smi info shows its health")
    if free < MIB:
        return failed(
            found, "end processes that use the device: npu-smi info -t proc-mem -i NPU_ID on the host lists them"
        )
    return passed(found)


def _check_processes(host: Host) -> Verdict:
    """Check that the device accepts more processes. In a virtual machine, a device accepts fewer processes."""
    count, device = host.count_processes(host.device), host.device
    limit, hint = MAX_PROCESSES, ""
    if host.is_virtual_machine:
        limit = MAX_PROCESSES_IN_VM
        hint = f' in a virtual machine: set processes = {limit} in [devices."ascend:{device}"]'
    if isinstance(count, OSError):
        return untestable(
            f"at most {limit} on a device{hint}; the current number is unknown: {count}",
            "on the host: npu-smi info -t proc-mem -i NPU_ID (a container may not see processes outside it)",
        )
    npu = host.npu(device)
    where = f" (NPU {npu.npu_id}, chip {npu.chip_id})" if npu else ""
    found = f"{count} of {limit} on ascend:{device}{where}{hint}"
    if count >= limit:
        return failed(found, "end some processes: another one would fail to open the device")
    return passed(found)


def _check_virtual_instance(host: Host) -> Verdict:
    """Check that the card is not a virtual instance, which refuses to share memory between processes."""
    if host.sharing_result(ATTACH) is CheckResult.PASS:
        return passed("not a virtual instance, or one that can share: the self-test could import memory")
    advice = "use a whole card: a virtual instance (vNPU) refuses to import shared memory"
    if re.search(r"vir\d", host.soc, re.IGNORECASE):
        return failed(f"a virtual instance: the chip's name is {host.soc}", advice)
    virtual = ", ".join(f"/dev/{each.name}" for each in host.cards if each.is_virtual)
    if virtual and all(each.is_virtual for each in host.cards):
        return failed(f"only device nodes of virtual instances: {virtual}", advice)
    test = (
        "test it with weightd doctor --model FILE.mindir; on the host: npu-smi info -t info-vnpu -i NPU_ID -c CHIP_ID"
    )
    doubt = ""
    if virtual:
        doubt = f"some device nodes are virtual instances: {virtual}"
    elif not host.cards:
        doubt = "no device nodes that would show a virtual instance"
    elif host.is_virtual_machine:
        doubt = "in a virtual machine, a virtual instance cannot be distinguished from a card"
    if doubt:
        return untestable(doubt, test)
    return passed(
        f"not a virtual instance: all device nodes are below /dev/davinci{FIRST_VIRTUAL_ID}"
        + (f", chip {host.soc}" if host.soc else "")
    )


def _parse_version(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)+", version)
    return tuple(map(int, match.group().split("."))) if match else ()


INDEPENDENT_CHECKS: Mapping[str, Check] = {INTERPRETER: _check_interpreter, PROCESS_EXITS: _check_process_exits}
"""The checks that need no Ascend hardware or software, by name in the order of the report."""

CHECKS: Mapping[str, Check] = {
    "service": _check_service,
    "device nodes": _check_device_nodes,
    "mindspore_lite": _check_library,
    "driver": _check_driver,
    "cann": _check_cann,
    "libascendcl": _check_libascendcl,
    "chip": _check_chip,
    "current_pid": _check_current_pid,
    "devices": _check_devices,
    "device memory": _check_memory,
    "processes": _check_processes,
    "virtual instance": _check_virtual_instance,
}
"""The checks of a host with Ascend cards, by name in the order of the report."""
