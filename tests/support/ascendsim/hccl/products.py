"""Differences between the kinds of cards (hccl constraints.md)."""

from __future__ import annotations

import re

A3, A2, A1, DUO, OLD = "A3", "A2", "910", "310P", "310"

_KINDS = (("Ascend910_93", A3), ("Ascend910B", A2), ("Ascend910", A1), ("Ascend310P", DUO), ("Ascend310", OLD))
_PORTS_SINCE = (25, 0)


def kind(soc_name: str) -> str:
    """Return the product of a chip name."""
    return next((product for prefix, product in _KINDS if soc_name.startswith(prefix)), A2)


def has_ports(product: str, driver: str) -> bool:
    """Return whether HCCL uses a table's device_port: on A2 and A3, with a driver of 25.0.RC1 or later."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", driver)[:2])
    return product in (A2, A3) and numbers >= _PORTS_SINCE
