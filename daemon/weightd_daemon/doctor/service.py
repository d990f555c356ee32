"""The systemd service that runs weightd: its environment, its user and the devices that it may open."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_COMMAND_TIMEOUT_S = 20.0

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

# PATH of a service whose unit does not set PATH; see systemd.exec(5).
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"

_IGNORE_ERRORS_PATTERN = re.compile(r" \(ignore_errors=(yes|no)\)$")

RunCommand = Callable[[list[str]], str]
"""A function that runs a command and returns its output, or raises OSError with the reason of the failure."""


@dataclass(frozen=True)
class SystemdUnit:
    """A service unit as `systemctl show` reports it.

    Attributes:
        name: the name of the unit.
        environment: the environment variables of the unit's processes, including those from its environment files.
        unreadable_files: environment files that could not be read.
        user: the user of the processes; "" for root.
        groups: names of additional groups of the processes, besides the user's groups.
        hides_devices: whether the unit has PrivateDevices=yes.
        allowed_devices: the device nodes that the processes may open; None if they may open all.
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
    """The user whose permissions the checks use: name, user id and group ids."""

    name: str
    uid: int
    gids: frozenset[int]


def read_unit(name: str, root: Path, run_command: RunCommand) -> SystemdUnit:
    """Return a service unit as systemd reports it.

    Raises:
        OSError: systemd does not run here, or has no such unit; the text names the cause.
    """
    if not name:
        raise OSError("no unit was named")
    text = run_command(["systemctl", "show", f"--property={','.join(_PROPERTIES)}", "--", name])
    properties: defaultdict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if value:
            properties[key].append(value)
    if properties["LoadState"] != ["loaded"]:
        raise OSError(f"systemd has no unit {name}")
    assignments = (each.partition("=") for each in shlex.split(" ".join(properties["Environment"])))
    environment = {"PATH": _DEFAULT_PATH, **{key: value for key, sign, value in assignments if sign}}
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


def user_of(unit: SystemdUnit | OSError) -> ServiceUser | OSError:
    """Return the user of the unit's processes; without a unit, the user of this process.

    If the user or a group of the unit does not exist on this host, return an error.
    """
    if isinstance(unit, OSError):
        uid = os.geteuid()
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:
            name = f"uid {uid}"
        return ServiceUser(name, uid, frozenset([os.getegid(), *os.getgroups()]))
    try:
        entry = pwd.getpwnam(unit.user or "root")
        groups = [int(name) if name.isdigit() else grp.getgrnam(name).gr_gid for name in unit.groups]
    except KeyError as error:
        return OSError(f"{unit.name}: {error.args[0]}")
    return ServiceUser(entry.pw_name, entry.pw_uid, frozenset([*os.getgrouplist(entry.pw_name, entry.pw_gid), *groups]))


def _parse_environment_file(text: str) -> Iterator[tuple[str, str]]:
    """Yield the variables in an environment file of systemd; values over several lines are not supported."""
    for line in text.splitlines():
        key, sign, value = line.strip().partition("=")
        if sign and not key.startswith(("#", ";")):
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            yield key.strip(), value[1:-1] if quoted else value


def run_for_output(argv: list[str]) -> str:
    """Run a command and return its output.

    Raises:
        OSError: the command cannot be run, fails, or takes too long.
    """
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise OSError(f"{argv[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(argv)} did not end within {_COMMAND_TIMEOUT_S:g} s") from None
    text = result.stdout.decode("utf-8", "replace")
    if result.returncode != 0:
        excerpt = " ".join(text.split())[:200]
        raise OSError(f"{' '.join(argv)} exited with status {result.returncode}: {excerpt}")
    return text
