"""The tables [devices.NAME]: the resources of a card that weightd may use, and the cores of a set of cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from weightd_common import devices, toml_schema
from weightd_common.devices import card_of, has_cores
from weightd_common.toml_schema import ErrorCollector
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import is_address
from weightd_daemon.platform.cgroup import allowed_cores
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, integer, label, short_repr, text


@dataclass(frozen=True)
class DeviceConfig:
    """A table [devices.NAME], for a NAME such as "ascend:0" or "cpu:0"."""

    memory_mib: int = field(default=0, metadata=integer(0, 2**40))
    """Memory of a card in MiB that weightd may use. 0: the memory that is free when the first model is loaded."""

    processes: int = field(default=ranktable.MAX_PROCESSES, metadata=integer(1, 4096))
    """Maximum processes on a card. The driver allows 63 on training cards and 32 in virtual machines."""

    cpus: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """Cores of a set of cores, out of the cores that weightd may use. Required for a set of cores, invalid for a
    card."""

    ip: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    """Address of the card's own network port, for the rank tables that weightd writes. Default: from /etc/hccn.conf, or
    none, which is sufficient for the cards of one host."""

    @property
    def cores(self) -> frozenset[int]:
        """The numbers of the cores in `cpus`; empty if `cpus` is not a valid list."""
        try:
            return devices.parse_cpulist(self.cpus)
        except ValueError:
            return frozenset()


def read_devices(content: Any, problems: ErrorCollector) -> dict[str, DeviceConfig]:
    """Return the tables [devices.NAME] by name; errors are added to `problems`.

    Raises:
        FieldError: `content` is not a table with tables [devices.NAME].
    """
    if type(content) is not dict:
        raise FieldError("expected tables [devices.NAME]")
    devices: dict[str, DeviceConfig] = {}
    for name, table in cast("dict[str, Any]", content).items():
        with problems.at(f".{label(name)}"):
            if card_of(name) is None and not has_cores(name):
                raise FieldError('expected the name of a card, such as "ascend:0", or of a set of cores, "cpu:0"')
            devices[name] = device = toml_schema.read_table(DeviceConfig, table, problems)
            problems.add(_check_core_set(device) if has_cores(name) else _check_card(device), "cpus", "ip")
    return devices


def _check_card(device: DeviceConfig) -> Iterator[FieldError]:
    if device.cpus:
        yield FieldError('has no effect on a card, only on a set of cores such as "cpu:0"').at(".cpus")
    if device.ip and not is_address(device.ip):
        yield FieldError(f'expected an address such as "192.168.1.8", got {short_repr(device.ip)}').at(".ip")


def _check_core_set(device: DeviceConfig) -> Iterator[FieldError]:
    for key in ("memory_mib", "processes", "ip"):
        if getattr(device, key) != getattr(DeviceConfig, key):
            yield FieldError("has no effect on the CPU, only on a card").at(f".{key}")
    if not device.cores:
        yield FieldError(f'expected cores such as "0-3,8", got {short_repr(device.cpus)}').at(".cpus")
    missing = device.cores - allowed_cores()
    if missing:
        expected = f"expected cores that weightd may use, {devices.format_cpulist(allowed_cores())}"
        yield FieldError(f"{expected}, got {devices.format_cpulist(missing)}").at(".cpus")
