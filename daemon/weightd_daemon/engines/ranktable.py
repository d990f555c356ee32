"""Rank tables of HCCL, the communication library of Ascend cards, for ranks on one host; and limits of these cards.

HCCL expects every value of a table as text, rereads a table whose status is not "completed" for half an hour, and finds
most errors only when ranks connect. So weightd checks a user's table before any process starts. This module does no
I/O.
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

# Maximum bytes of a rank table file; more than the table of the largest rank group needs.
MAX_BYTES = 1024 * 1024

SUFFIX = ".json"

# Supported versions. Version 1.2 adds super pods to version 1.0. Version 1.1 is for heterogeneous hosts; tables without
# a version have another format.
_VERSIONS = ("1.0", "1.2")
_COMPLETED = "completed"
_MAX_SERVER_ID = 64

# Form of the numbers that HCCL accepts: without sign or space. No value needs more than six digits.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
_ADDRESS = re.compile(r"address_(0|[1-9][0-9]{0,3})\s*=\s*(\S+)\s*")


class RankDevice(NamedTuple):
    """The card of one rank of a group.

    Attributes:
        physical_id: the physical number of the card: N of /dev/davinciN.
        ip: the address of the card's network port; "" if unknown.
        port: the port of the card on which HCCL listens for the other ranks; 0 for HCCL's default.
    """

    physical_id: int
    ip: str = ""
    port: int = 0


class RankTable(NamedTuple):
    """The content of a rank table.

    Attributes:
        devices: the card of each rank, in the order of ranks.
        server: the id of the only host in the table.
    """

    devices: tuple[RankDevice, ...]
    server: str


# --- generation -------------------------------------------------------------------------------------------------------


def generate(devices: Sequence[RankDevice], server: str = "localhost") -> str:
    """Return the text of the rank table for a rank group on one host; `devices` has the card of each rank.

    The table contains the addresses of the cards only if all are known; on one host, HCCL needs no addresses.
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
    """Return the addresses of cards in the text of /etc/hccn.conf, by the physical number of the card."""
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
    """Yield an error if HCCL would reject the path, with links resolved: `.json` must occur once, at its end."""
    if not path.endswith(SUFFIX) or path.count(SUFFIX) > 1:
        yield f"expected a path with {SUFFIX} once, at its end, got {path!r}"


def parse(text: str) -> RankTable:
    """Parse a rank table and return its content.

    Raises:
        FieldError: HCCL would reject the table, wait until it is completed, or need several hosts. The error has the
            path of the field.
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
        devices: the physical number of each rank's card, or None if the card is unknown. The keys are the configured
            names of the devices, in the order of ranks.
    """
    if len(table.devices) != len(devices):
        yield f"expected {len(devices)} ranks, as devices has, got {len(table.devices)}"
        return
    for rank, (entry, (name, number)) in enumerate(zip(table.devices, devices.items(), strict=True)):
        if number is not None and entry.physical_id != number:
            yield f"rank {rank}: expected device_id {number}, which {name} is, got {entry.physical_id}"


def _parse_head(table: Mapping[str, Any]) -> bool:
    """Check the version, status and number of servers; return whether the table has super pods."""
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
    """Check that the super pods contain all servers of the table, and no others."""
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


# Maximum number of processes on a card, from the vendor's document aclcppdevg_000222: 63 on training cards and 800I A2,
# 64 on other hosts, 32 in virtual machines.
MAX_PROCESSES = 63
MAX_PROCESSES_IN_VM = 32

# Spares of a model on cards. Only processes that existed when the holder built the model can attach on a card, so a
# spare must replace a lost worker.
DEFAULT_SPARES = 1

# Size of the card's huge pages. Shared weights take whole huge pages, and one more even if they fill the pages exactly.
_HUGE_PAGE_BYTES = 2 * MIB


def card_bytes(weight_bytes: int) -> int:
    """Return the bytes that `weight_bytes` of weights take on a card."""
    return (weight_bytes // _HUGE_PAGE_BYTES + 1) * _HUGE_PAGE_BYTES


def physical_id(device: int, visible: str) -> int | None:
    """Return the physical number of the card that a process sees as number `device`.

    `visible` is the value of ASCEND_RT_VISIBLE_DEVICES, the list of visible cards; "" means all cards. Return None if
    the list is too short or the entry is not a number.
    """
    if not visible.strip():
        return device
    listed = [each.strip() for each in visible.split(",")]
    number = listed[device] if device < len(listed) else ""
    return int(number) if number.isdecimal() else None
