"""The tables [devices.NAME]: what of a card weightd may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from weightd.daemon.config import tables
from weightd.daemon.config.tables import Problems
from weightd.daemon.engines import ascend
from weightd.protocol.schema import FieldError, integer, label
from weightd.shared.devices import card_of


@dataclass(frozen=True)
class DeviceConfig:
    """A table [devices.NAME], for a NAME such as "ascend:0"."""

    memory_mib: int = field(default=0, metadata=integer(0, 2**40))
    """MiB that weightd may use there. Default: what is free when the first model is loaded."""

    processes: int = field(default=ascend.MAX_PROCESSES, metadata=integer(1, 4096))
    """Processes that may use the device: the driver's limit is 63 on training cards, 32 in virtual machines."""


def read_devices(content: Any, problems: Problems) -> dict[str, DeviceConfig]:
    """Return the tables by name; what is wrong is added to `problems`.

    Raises:
        FieldError: these are no tables.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [devices.NAME]")
    devices: dict[str, DeviceConfig] = {}
    for name, table in cast("dict[str, Any]", content).items():
        with problems.at(f".{label(name)}"):
            if card_of(name) is None:
                raise FieldError('expected the name of a card, such as "ascend:0"')
            devices[name] = tables.read(DeviceConfig, table, problems)
    return devices
