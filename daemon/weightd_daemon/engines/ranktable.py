"""The rank tables of HCCL, the vendor's communication library, for ranks on this host; and the limits of Ascend cards.

HCCL expects every value of a table as text, rereads a table that is not "completed" for half an hour, and finds most
errors only when ranks connect. So a table from the user is checked by the same rules as a table that weightd generates,
before any process starts. This module does no I/O.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from weightd_daemon.platform.memory import MIB
from weightd_protocol.schema import FieldError, describe_value, short_repr

DEFAULT_PORT = 16666
MAX_PORT = 65535

# Maximum size of a rank table file: more than the table of the largest rank group needs.
MAX_BYTES = 1024 * 1024

SUFFIX = ".json"

# Version 1.2 adds super pods to 1.0. Version 1.1 is for heterogeneous hosts, and a table without a version has another
# format altogether.
_VERSIONS = ("1.0", "1.2")
_COMPLETED = "completed"
_MAX_SERVER_ID = 64

# The numbers that HCCL accepts: without sign or space, and with no more digits than any value needs.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_ADDRESS = re.compile(r"address_(0|[1-9][0-9]{0,3})\s*=\s*(\S+)\s*")


class RankDevice(NamedTuple):
    """The card of one rank of a group.

    Attributes:
        physical_id: the physical number: N of /dev/davinciN.
        ip: the address of the card's network port; "" if unknown.
        port: the port on which its communication listens; 0 for HCCL's default.
    """

    physical_id: int
    ip: str = ""
    port: int = 0


class RankTable(NamedTuple):
    """The content of a rank table.

    Attributes:
        devices: the card of each rank, in the order of ranks.
        server: the only host that it names.
    """

    devices: tuple[RankDevice, ...]
    server: str


# --- generation -------------------------------------------------------------------------------------------------------


def generate(devices: Sequence[RankDevice], server: str = "localhost") -> str:
    """Return the rank table of a group whose ranks have these devices, all on this host.

    The table contains the addresses only if all are known; on one host, HCCL does not need them.
    """
    has_ips = all(each.ip for each in devices)
    entries: list[dict[str, str]] = []
    for rank, device in enumerate(devices):
        entry = {"device_id": str(device.physical_id)}
        if has_ips:
            entry["device_ip"] = device.ip
        if device.port:
            entry["device_port"] = str(device.port)
        entries.append({**entry, "rank_id": str(rank)})
    table = {
        "version": "1.0",
        "server_count": "1",
        "status": _COMPLETED,
        "server_list": [{"server_id": server, "device": entries}],
    }
    return json.dumps(table, indent=2) + "\n"


def parse_addresses(hccn_conf: str) -> dict[int, str]:
    """Return the addresses in the text of /etc/hccn.conf, by the physical number of the card."""
    matches = (_ADDRESS.fullmatch(line.strip()) for line in hccn_conf.splitlines())
    return {int(match.group(1)): match.group(2) for match in matches if match and is_address(match.group(2))}


def is_address(text: str) -> bool:
    """Return whether a text is an IP address without a zone."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


# --- parsing ----------------------------------------------------------------------------------------------------------


def path_problems(path: str) -> Iterator[str]:
    """Yield why HCCL would not read a table at this path, with links resolved: it accepts only one `.json` in it."""
    if not path.endswith(SUFFIX) or path.count(SUFFIX) > 1:
        yield f"expected a path with {SUFFIX} once, at its end, got {path!r}"


def parse(text: str) -> RankTable:
    """Return the content of a rank table.

    Raises:
        FieldError: HCCL would reject the table, wait for it, or not run it on one host. The error has the path of the
            field.
    """
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(f"not JSON: {error}") from None
    table = _expect_object(content)
    has_pods = _parse_head(table)
    names: list[str] = []
    ranks: dict[int, RankDevice] = {}
    for index, server in enumerate(_get_list(table, "server_list")):
        with _error_at(f".server_list[{index}]"):
            _parse_server(_expect_object(server), names, ranks, has_pods=has_pods)
    with _error_at(".server_list"):
        _check_complete(names, ranks)
    if has_pods:
        _check_pods(table, names)
    return RankTable(tuple(ranks[rank] for rank in sorted(ranks)), names[0])


def device_problems(table: RankTable, devices: Mapping[str, int | None]) -> Iterator[str]:
    """Yield the differences between a rank table and the configured devices of a group.

    Args:
        table: the parsed table.
        devices: the physical number of each rank's card, in the order of ranks, by the name in the configuration; None
            if no card is known by that name.
    """
    if len(table.devices) != len(devices):
        yield f"expected {len(devices)} ranks, as devices has, got {len(table.devices)}"
        return
    for rank, (entry, (name, number)) in enumerate(zip(table.devices, devices.items(), strict=True)):
        if number is not None and entry.physical_id != number:
            yield f"rank {rank}: expected device_id {number}, which {name} is, got {entry.physical_id}"


def _parse_head(table: Mapping[str, Any]) -> bool:
    """Check the fields before the servers; return whether the servers are in super pods."""
    version = _get_text(table, "version")
    if version not in _VERSIONS:
        raise FieldError(f"expected one of {', '.join(_VERSIONS)}, got {short_repr(version)}").at(".version")
    status = _get_text(table, "status")
    if status != _COMPLETED:
        raise FieldError(f'expected "{_COMPLETED}", because HCCL waits otherwise, got {short_repr(status)}').at(
            ".status"
        )
    count = len(_get_list(table, "server_list"))
    if "server_count" in table and _get_number(table, "server_count") != count:
        text = f'expected "{count}", as server_list has, got {short_repr(table["server_count"])}'
        raise FieldError(text).at(".server_count")
    return version == "1.2"


def _check_complete(names: Sequence[str], ranks: Mapping[int, RankDevice]) -> None:
    if len(names) > 1:
        raise FieldError(f"expected one server, because all ranks are on this host, got {len(names)}")
    if not ranks:
        raise FieldError("expected at least one device")
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise FieldError(f"expected ranks 0 to {len(ranks) - 1}, but there is no rank {missing}")


def _parse_server(server: Mapping[str, Any], names: list[str], ranks: dict[int, RankDevice], *, has_pods: bool) -> None:
    name = _get_text(server, "server_id")
    if not 0 < len(name) <= _MAX_SERVER_ID:
        raise FieldError(f"expected 1 to {_MAX_SERVER_ID} characters, got {len(name)}").at(".server_id")
    names.append(name)
    for index, entry in enumerate(_get_list(server, "device")):
        with _error_at(f".device[{index}]"):
            rank, device = _parse_device(_expect_object(entry), has_pods=has_pods)
            _check_unique(rank, device, ranks)
            ranks[rank] = device


def _parse_device(entry: Mapping[str, Any], *, has_pods: bool) -> tuple[int, RankDevice]:
    if has_pods:
        _get_number(entry, "super_device_id")
    ip = ""
    if "device_ip" in entry:
        ip = _get_text(entry, "device_ip")
        if not is_address(ip):
            raise FieldError(f"expected an address, got {short_repr(ip)}").at(".device_ip")
    port = 0
    if "device_port" in entry:
        port = _get_number(entry, "device_port")
        if not 0 < port <= MAX_PORT:
            raise FieldError(f'expected a port, "1" to "{MAX_PORT}", got "{port}"').at(".device_port")
    return _get_number(entry, "rank_id"), RankDevice(_get_number(entry, "device_id"), ip, port)


def _check_unique(rank: int, device: RankDevice, ranks: Mapping[int, RankDevice]) -> None:
    if rank in ranks:
        raise FieldError(f'"{rank}" is given twice').at(".rank_id")
    for other in ranks.values():
        if other.physical_id == device.physical_id:
            raise FieldError(f'"{device.physical_id}" is given twice').at(".device_id")
        if device.ip and other.ip == device.ip:
            raise FieldError(f'"{device.ip}" is given twice').at(".device_ip")


def _check_pods(table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check that each server belongs to a super pod."""
    pod_servers: list[str] = []
    for index, each in enumerate(_get_list(table, "super_pod_list")):
        with _error_at(f".super_pod_list[{index}]"):
            pod = _expect_object(each)
            _get_text(pod, "super_pod_id")
            for location, server in enumerate(_get_list(pod, "server_list")):
                with _error_at(f".server_list[{location}]"):
                    pod_servers.append(_get_text(_expect_object(server), "server_id"))
    if sorted(pod_servers) != sorted(names):
        text = f"expected the servers of server_list, {', '.join(names)}, got {', '.join(pod_servers)}"
        raise FieldError(text).at(".super_pod_list")


@contextlib.contextmanager
def _error_at(step: str) -> Generator[None, None, None]:
    try:
        yield
    except FieldError as error:
        raise error.at(step) from None


def _expect_object(value: Any) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise FieldError(f"expected an object, got {describe_value(value)}")
    return cast("dict[str, Any]", value)


def _get_list(table: Mapping[str, Any], key: str) -> list[Any]:
    value = _get_value(table, key)
    if type(value) is not list:
        raise FieldError(f"expected a list, got {describe_value(value)}").at(f".{key}")
    items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
    return items  # pyright: ignore[reportUnknownVariableType]


def _get_text(table: Mapping[str, Any], key: str) -> str:
    value = _get_value(table, key)
    if type(value) is not str:
        raise FieldError(f"expected text, as HCCL stores every value, got {describe_value(value)}").at(f".{key}")
    return value


def _get_number(table: Mapping[str, Any], key: str) -> int:
    value = _get_text(table, key)
    if not _NUMBER.fullmatch(value):
        raise FieldError(f"expected a number as text, got {short_repr(value)}").at(f".{key}")
    return int(value)


def _get_value(table: Mapping[str, Any], key: str) -> Any:
    if key not in table:
        raise FieldError("missing").at(f".{key}")
    return table[key]


# From aclcppdevg_000222, for training cards and 800I A2; other hosts allow 64, virtual machines 32.
MAX_PROCESSES = 63
MAX_PROCESSES_IN_VM = 32

# On cards, only processes that the holder knew at its build can attach, so the successor of a lost worker must be one
# of these.
DEFAULT_SPARES = 1

# Shared weights take whole huge pages of the card, and one more even if they fit exactly.
_HUGE_PAGE_BYTES = 2 * MIB


def card_bytes(weight_bytes: int) -> int:
    """Return the bytes that `weight_bytes` of weights take on a card."""
    return (weight_bytes // _HUGE_PAGE_BYTES + 1) * _HUGE_PAGE_BYTES


def physical_id(device: int, visible: str) -> int | None:
    """Return the host's number of a device that a process numbers within ASCEND_RT_VISIBLE_DEVICES.

    `visible` is the value of that variable. Return None if the list is too short or its entry is not a number.
    """
    if not visible.strip():
        return device
    listed = [each.strip() for each in visible.split(",")]
    number = listed[device] if device < len(listed) else ""
    return int(number) if number.isdecimal() else None
