"""Environment variables of HCCL, read at its initialisation."""

from __future__ import annotations

from typing import Mapping, NamedTuple

from ascendsim.hccl import products
from ascendsim.hccl.errors import HcclError

_CONNECT_S = 120  # hccl HCCL_CONNECT_TIMEOUT.md; hcomm platform/common/externalinput.cc:530
_EXEC_S = 1836  # hccl HCCL_EXEC_TIMEOUT.md; externalinput.cc:972
_EXEC_STEP_S = 68
_EXEC_MAX_S = 17340
_BUFFER_MIB = 200  # hccl HCCL_BUFFSIZE.md
_INT_MAX = 2**31 - 1

LINK_MORE_S = 20
"""How much longer than the connect time-out a missing rank is waited for (hccl param_link_stage.md)."""


class Settings(NamedTuple):
    """Timeouts in documented seconds (`exec_s` 0: none), and `buffer_mib`, the size of one of two buffers."""

    connect_s: int
    exec_s: int
    buffer_mib: int


def read(variables: Mapping[str, str], exec_option: str, product: str) -> Settings:
    """Read the variables; `exec_option` is ge.exec.hcclExecuteTimeOut, which overrides them (ge hcom_plugin.cc:277)."""
    exec_text = exec_option or variables.get("HCCL_EXEC_TIMEOUT", str(_EXEC_S))
    exec_s = _number("HCCL_EXEC_TIMEOUT", exec_text, 0, _INT_MAX)
    if product in (products.A1, products.DUO):
        exec_s = min(max(exec_s // _EXEC_STEP_S, 1) * _EXEC_STEP_S, _EXEC_MAX_S)
    connect = variables.get("HCCL_CONNECT_TIMEOUT", str(_CONNECT_S))
    buffer = variables.get("HCCL_BUFFSIZE", str(_BUFFER_MIB))
    return Settings(
        _number("HCCL_CONNECT_TIMEOUT", connect, 120, 7200), exec_s, _number("HCCL_BUFFSIZE", buffer, 1, _INT_MAX)
    )


def _number(name: str, text: str, min_value: int, max_value: int) -> int:
    if not text.isdigit() or not min_value <= int(text) <= max_value:
        raise HcclError(
            "EI0001", f"Environment variable [{name}] is invalid. Reason: {text} is not in [{min_value}, {max_value}]"
        )
    return int(text)
