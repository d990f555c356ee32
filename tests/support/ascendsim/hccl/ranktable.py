"""Parser of rank tables with HCCL's checks (hcomm framework/common/src/topo/).

The parser reads versions 1.0 (servers) and 1.2 (A3), and rejects 1.1 (heterogeneous) and tables without a version (the
old template).
"""

from __future__ import annotations

import ipaddress
import json
import os
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, cast

from ascendsim.hccl import products
from ascendsim.hccl.errors import HcclError

DEFAULT_PORT = 16666
POLLED_S = 30 * 60
"""Seconds for which an incomplete table is read again each second (topoinfo_ranktableParser.cc:36)."""

_OLDER_DEVICES = 8
_MAX_SERVER_ID = 64


class Device(NamedTuple):
    """One rank: `device` is the physical id, `ip` may be "", only tables of A3 have `super_device`."""

    rank: int
    server: str
    device: int
    ip: str
    port: int
    super_device: str


class RankTable(NamedTuple):
    """A table with `devices` in rank order; `crc` ignores white space (param_check.cc:106)."""

    version: str
    devices: Tuple[Device, ...]
    crc: int


def load(path: str, tick: Callable[[], None]) -> RankTable:
    """Read a table once its status is "completed"; `tick` sleeps for a second between reads."""
    real = os.path.realpath(path)
    # topoinfo_ranktableParser.cc:50: ".json" must occur once, at the end.
    if real.count(".json") != 1 or not real.endswith(".json"):
        raise _invalid(f"the path {real} of the table is not the path of one .json file")
    for _ in range(POLLED_S):
        values = _read(Path(real))
        if values.get("status") == "completed":
            return parse(values)
        tick()
    raise _invalid(f"the status of the table was not completed within {POLLED_S} s")


def _read(path: Path) -> Dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _invalid(f"the table cannot be read: {error}") from None
    table: Dict[str, Any] = cast("Dict[str, Any]", values) if isinstance(values, dict) else {}
    if not isinstance(table.get("status"), str):
        raise _invalid("the table has no status")
    return table


def parse(values: Dict[str, Any]) -> RankTable:
    """Parse a table, and check its consistency."""
    _check_strings("", values)
    version = values.get("version", "")
    if version not in ("1.0", "1.2"):
        raise _invalid(f"version {version!r}; a group_list and heterogeneous servers are not simulated")
    servers: List[Dict[str, Any]] = _items(values, "server_list")
    if values.get("server_count", str(len(servers))) != str(len(servers)):
        raise _invalid(f"server_count {values['server_count']} of {len(servers)} servers (ranktableConcise.cc:235)")
    if version == "1.2":
        _check_pods(values, servers)
    devices = [_device(server, each, version) for server in servers for each in _items(server, "device")]
    devices.sort()
    if [each.rank for each in devices] != list(range(len(devices))):
        raise _invalid(f"rank_ids {[each.rank for each in devices]} are not 0 to n-1, each once (config.cc:359)")
    _check_unique("device_id", [(each.server, each.device) for each in devices])
    _check_unique("device_ip", [each.ip for each in devices if each.ip])
    crc = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    return RankTable(version, tuple(devices), crc)


def check_process(table: RankTable, rank: int, device: int, ip: str, product: str) -> Device:
    """Check the table against the process of this rank on this physical device, whose card has this address."""
    if not 0 <= rank < len(table.devices):
        raise _invalid(f"the table has no rank {rank} (ranktableConcise.cc:144)")
    mine = table.devices[rank]
    if mine.device != device:
        raise _mismatch(f"device_id {mine.device} of rank {rank} is not the process's device {device}")
    if mine.ip and mine.ip != ip:
        raise _mismatch(f"device_ip {mine.ip} of rank {rank} is not the card's {ip}")
    servers = {each.server for each in table.devices}
    _check_product(table, servers, product)
    for server in servers:
        _check_server([each.device for each in table.devices if each.server == server], product)
    return mine


def _check_product(table: RankTable, servers: Any, product: str) -> None:
    if (table.version == "1.2") != (product == products.A3):
        raise _invalid(f"version {table.version} on {product}")
    if product == products.DUO and len(servers) > 1:
        raise _invalid("a 300I Duo has one server")
    may_lack = len(servers) == 1 and product != products.DUO
    if not may_lack and not all(each.ip for each in table.devices):
        raise _invalid("a device_ip is missing (ranktableConcise.cc:513)")


def _check_server(devices: Sequence[int], product: str) -> None:
    if product in (products.A1, products.DUO) and max(devices) >= _OLDER_DEVICES:
        raise _invalid(f"device_id {max(devices)} is not 0 to {_OLDER_DEVICES - 1} (ranktableConcise.cc:429)")
    halves = {device // 4 for device in devices}
    if product == products.A1 and (len(devices) not in (1, 2, 4, 8) or (len(devices) < 8 and len(halves) > 1)):
        raise _invalid(f"devices {sorted(devices)}: 1, 2, 4 or 8, and not across 0-3 and 4-7 (hccl constraints.md)")


def _check_strings(name: str, value: Any) -> None:
    if _is(value, dict):
        for key, each in value.items():
            _check_strings(key, each)
    elif _is(value, list):
        for each in value:
            _check_strings(name, each)
    elif not isinstance(value, str):
        # topoinfo_ranktableParser.cc:343, :396
        raise HcclError("EI0017", f"The value {value!r} of {name} in the rank table is not a string")


def _check_pods(values: Dict[str, Any], servers: Sequence[Dict[str, Any]]) -> None:
    pods = _items(values, "super_pod_list")
    named = [each.get("server_id") for pod in pods for each in _items(pod, "server_list")]
    if sorted(map(str, named)) != sorted(str(each.get("server_id")) for each in servers):
        raise _invalid("super_pod_list and server_list have different servers")


def _items(values: Dict[str, Any], name: str) -> List[Dict[str, Any]]:
    items: Any = values.get(name)
    if not _is(items, list) or not items or not all(_is(each, dict) for each in items):
        raise _invalid(f"there is no {name}")
    listed: List[Dict[str, Any]] = items
    return listed


def _is(value: Any, kind: type) -> bool:
    """Do the same as isinstance, without narrowing to a container of unknown type in type checkers."""
    return isinstance(value, kind)


def _device(server: Dict[str, Any], values: Dict[str, Any], version: str) -> Device:
    name = server.get("server_id", "")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_SERVER_ID:
        raise _invalid(f"server_id {name!r} is not of 1 to {_MAX_SERVER_ID} characters (ranktableConcise.cc:262)")
    super_device = values.get("super_device_id", "")
    if version == "1.2" and not super_device:
        raise _invalid("a device has no super_device_id")
    ip = values.get("device_ip", "")
    try:
        ip = ip and str(ipaddress.ip_address(ip))
    except ValueError:
        raise _invalid(f"device_ip {ip!r}") from None
    port = _number(values, "device_port", str(DEFAULT_PORT))
    if not 1 <= port <= 65535:
        raise _invalid(f"device_port {port}")
    return Device(_number(values, "rank_id"), name, _number(values, "device_id"), ip, port, super_device)


def _number(values: Dict[str, Any], name: str, default: Optional[str] = None) -> int:
    text = values.get(name, default)
    if not isinstance(text, str) or not text.isdecimal():
        raise _invalid(f"{name} {text!r}")
    return int(text)


def _check_unique(name: str, values: Sequence[Any]) -> None:
    if len(set(values)) != len(values):
        raise _invalid(f"duplicate {name}")


def _invalid(reason: str) -> HcclError:
    return HcclError("EI0004", f"The ranktable or rank is invalid, Reason: {reason}")


def _mismatch(reason: str) -> HcclError:
    return HcclError("EI0014", f"The ranktable does not fit this process, Reason: {reason}")
