"""The numbers of the page, as JSON."""

from __future__ import annotations

import json
from typing import Any

from weightd.shared.overview.rows import Overview
from weightd.shared.overview.values import to_json_values

# A browser draws no more of them.
_MOST_PROCESSES = 1024

# What is nobody's who looks at a page: numbers and paths of this host.
_PRIVATE = ("note",)
_PRIVATE_OF_PROCESS = ("pid",)


def status_json(overview: Overview | None, age_s: float = 0.0, trouble: str = "") -> bytes:
    """Return what is told to the page.

    Args:
        overview: the last picture; None where there is none yet.
        age_s: how old it is.
        trouble: why there is no newer one, if there is none.
    """
    daemon = {"age_s": round(age_s, 1), "trouble": trouble}
    told = {"daemon": daemon, "overview": None if overview is None else _told(overview)}
    return json.dumps(told, separators=(",", ":"), allow_nan=False).encode()


def _told(overview: Overview) -> dict[str, Any]:
    told = to_json_values(overview)
    processes = [_without(each, _PRIVATE_OF_PROCESS) for each in told["processes"][:_MOST_PROCESSES]]
    return {**_without(told, _PRIVATE), "processes": processes}


def _without(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
