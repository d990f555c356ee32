"""The service, its user and the driver's device nodes: whether weightd's processes may open what they need.

Who runs the doctor has sourced CANN's set_env.sh in a shell; the service has not. So where systemd has a unit, its
environment, user and devices count. Nodes are looked at, never opened: a driver counts who does.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightd_daemon.doctor.findings import Finding, failed, passed, untestable
from weightd_daemon.doctor.host_facts import RunCommand, run_for_output

_PROPERTIES = (
    "LoadState",
    "Environment",
    "EnvironmentFiles",
    "User",
    "Group",
    "SupplementaryGroups",
    "PrivateDevices",
    "DevicePolicy",
    "DeviceAllow",
)

# What a service has before its unit says anything; see systemd.exec(5).
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"

_IGNORE_ERRORS_PATTERN = re.compile(r" \(ignore_errors=(yes|no)\)$")

# Beside the card's own: the device manager, shared virtual memory, and the channel between host and card.
REQUIRED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")

_READ_WRITE = 0o6

SERVICE = "service"

NODES = "device nodes"

_CARD_PATTERN = re.compile(r"/dev/v?davinci\d+")

CONTAINER_ADVICE = (
    "into a container: docker run --device /dev/davinciN "
    + " ".join(f"--device /dev/{name}" for name in REQUIRED_NODES)
    + " -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /etc/ascend_install.info:/etc/ascend_install.info:ro"
    " --group-add GID-OF-THE-NODES; or by the Ascend Docker Runtime: -e ASCEND_VISIBLE_DEVICES=N"
)

_DROP_IN_ADVICE = (
    "install the drop-in weightd.service.d/ascend.conf (docs/operations.md, Cards), and look through it first"
)


@dataclass(frozen=True)
class SystemdUnit:
    """A service as `systemctl show` has it.

    Attributes:
        name: of the unit.
        environment: of its processes, with that of its files.
        unreadable_files: files of its environment that could not be read.
        user: whose its processes are; "" for root.
        groups: names of groups that it gives them beside the user's own.
        hides_devices: PrivateDevices=yes.
        allowed_devices: device nodes that it opens, where it opens no others; None where it opens all.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    unreadable_files: tuple[str, ...] = ()
    user: str = ""
    groups: tuple[str, ...] = ()
    hides_devices: bool = False
    allowed_devices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ServiceUser:
    """Whose rights count: a user's name, uid and groups."""

    name: str
    uid: int
    gids: frozenset[int]


def read_unit(name: str, root: Path = Path("/"), run_command: RunCommand | None = None) -> SystemdUnit:
    """Return what systemd says of a unit.

    Raises:
        OSError: there is no such unit, or no systemd; the text says which.
    """
    if not name:
        raise OSError("no unit was named")
    text = (run_command or run_for_output)(["systemctl", "show", f"--property={','.join(_PROPERTIES)}", "--", name])
    properties: defaultdict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if value:
            properties[key].append(value)
    if properties["LoadState"] != ["loaded"]:
        raise OSError(f"systemd has no unit {name}")
    environment = {"PATH": _DEFAULT_PATH, **_parse_assignments(shlex.split(" ".join(properties["Environment"])))}
    unreadable_files: list[str] = []
    for file in (_IGNORE_ERRORS_PATTERN.sub("", each) for each in properties["EnvironmentFiles"]):
        try:
            environment.update(_parse_environment_file((root / file.lstrip("/")).read_text("utf-8", "replace")))
        except OSError:
            unreadable_files.append(file)
    restricts_devices = properties["DevicePolicy"] not in ([], ["auto"]) or bool(properties["DeviceAllow"])
    return SystemdUnit(
        name,
        environment,
        tuple(unreadable_files),
        "".join(properties["User"]),
        tuple(" ".join(properties["Group"] + properties["SupplementaryGroups"]).split()),
        properties["PrivateDevices"] == ["yes"],
        tuple(each.split()[0] for each in properties["DeviceAllow"]) if restricts_devices else None,
    )


def service_user(unit: SystemdUnit) -> ServiceUser:
    """Return whose rights the unit's processes have.

    Raises:
        OSError: its user or a group does not exist here.
    """
    try:
        entry = pwd.getpwnam(unit.user or "root")
        groups = [int(name) if name.isdigit() else grp.getgrnam(name).gr_gid for name in unit.groups]
    except KeyError as error:
        raise OSError(f"{unit.name}: {error.args[0]}") from None
    return ServiceUser(entry.pw_name, entry.pw_uid, frozenset([*os.getgrouplist(entry.pw_name, entry.pw_gid), *groups]))


def current_user() -> ServiceUser:
    """Return whose rights this process has."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return ServiceUser(name, uid, frozenset([os.getegid(), *os.getgroups()]))


@dataclass(frozen=True)
class DeviceNode:
    """A file below /dev: its name there, permissions, owner and group."""

    name: str
    mode: int
    uid: int
    gid: int

    def is_accessible_to(self, identity: ServiceUser) -> bool:
        """Return whether the permissions let it be read and written; access control lists are not looked at."""
        if identity.uid == 0:
            return True
        shift = 6 if identity.uid == self.uid else 3 if self.gid in identity.gids else 0
        return (self.mode >> shift) & _READ_WRITE == _READ_WRITE

    @property
    def group_name(self) -> str:
        """The name of its group, or its number where it has none here, as in a container."""
        try:
            return grp.getgrgid(self.gid).gr_name
        except KeyError:
            return str(self.gid)

    def __str__(self) -> str:
        return f"/dev/{self.name} ({self.mode:04o}, group {self.group_name})"


def read_device_nodes(root: Path = Path("/")) -> tuple[DeviceNode, ...]:
    """Return the driver's nodes below `root`/dev, by name."""
    device_nodes: list[DeviceNode] = []
    try:
        paths = sorted((root / "dev").iterdir())
    except OSError:
        return ()
    for path in paths:
        if path.name in REQUIRED_NODES or path.name.startswith(("davinci", "vdavinci")):
            status = path.stat()
            device_nodes.append(DeviceNode(path.name, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid))
    return tuple(device_nodes)


def check_service(unit: SystemdUnit | OSError) -> Finding:
    """Whose environment, user and devices were judged, and whether a service gets to the cards at all."""
    if isinstance(unit, OSError):
        found = f"{unit}: this shell's environment and user were judged"
        return untestable(SERVICE, found, "for a service, on its host: weightd doctor --unit NAME")
    home = unit.environment.get("ASCEND_HOME_PATH", "not set")
    found = f"the environment of {unit.name} was judged: user {unit.user or 'root'}, ASCEND_HOME_PATH {home}"
    if unit.hides_devices:
        return failed(SERVICE, f"{found}; PrivateDevices=yes hides every card", _DROP_IN_ADVICE)
    denied_nodes = _denied_nodes(unit)
    if denied_nodes:
        return failed(SERVICE, f"{found}; DeviceAllow= lacks {', '.join(denied_nodes)}", _DROP_IN_ADVICE)
    if unit.unreadable_files:
        return untestable(
            SERVICE, f"{found}; {', '.join(unit.unreadable_files)} cannot be read", "run the doctor as root"
        )
    return passed(SERVICE, found)


def check_device_nodes(nodes: Sequence[DeviceNode], identity: ServiceUser | OSError, group: str) -> Finding:
    """The driver's nodes are there, and open to whoever runs weightd.

    Args:
        nodes: what is there.
        identity: who that is, or why it is not known.
        group: that the driver was installed for, "" if not known.
    """
    cards = [each for each in nodes if _CARD_PATTERN.fullmatch(f"/dev/{each.name}")]
    if not cards:
        return untestable(NODES, "no /dev/davinciN", CONTAINER_ADVICE)
    missing = [name for name in REQUIRED_NODES if name not in {each.name for each in nodes}]
    if missing:
        return failed(
            NODES, f"no {', '.join(f'/dev/{name}' for name in missing)}", f"load the driver; {CONTAINER_ADVICE}"
        )
    if isinstance(identity, OSError):
        return untestable(NODES, f"whether the service may open them is unknown: {identity}", "create its user")
    denied_nodes = [each for each in nodes if each not in cards and not each.is_accessible_to(identity)]
    if not any(each.is_accessible_to(identity) for each in cards):
        denied_nodes = cards + denied_nodes
    if denied_nodes:
        group = group or denied_nodes[0].group_name
        advice = f"put {identity.name} into the group: usermod --append --groups {group} {identity.name}; for the "
        advice += (
            f"service, SupplementaryGroups={group} in the drop-in; for a container, --group-add {denied_nodes[0].gid}"
        )
        return failed(NODES, f"{identity.name} may not open {', '.join(map(str, denied_nodes))}", advice)
    return passed(NODES, f"{identity.name} may open {cards[0]} and {', '.join(REQUIRED_NODES)}")


def _parse_assignments(assignments: list[str]) -> dict[str, str]:
    return {key: value for key, sign, value in (each.partition("=") for each in assignments) if sign}


def _parse_environment_file(text: str) -> Iterator[tuple[str, str]]:
    """The assignments of an environment file, as far as they are on a line each."""
    for line in text.splitlines():
        key, sign, value = line.strip().partition("=")
        if sign and not key.startswith(("#", ";")):
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            yield key.strip(), value[1:-1] if quoted else value


def _denied_nodes(unit: SystemdUnit) -> list[str]:
    """The nodes that DeviceAllow= leaves out; what a class of devices ("char-...") contains is not known."""
    if unit.allowed_devices is None or any(each.startswith("char-") for each in unit.allowed_devices):
        return []
    has_card = any(_CARD_PATTERN.fullmatch(each) for each in unit.allowed_devices)
    needed = [f"/dev/{name}" for name in REQUIRED_NODES]
    return ["/dev/davinciN"] * (not has_card) + [each for each in needed if each not in unit.allowed_devices]
