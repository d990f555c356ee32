"""The numbers of the page, as JSON."""

from __future__ import annotations

import json
from typing import Any

from weightd_common.dashboard.overview import Overview, to_json_values

# A browser draws no more of them.
_MAX_PROCESSES = 1024

# What is nobody's who looks at a page: numbers and paths of this host.
_PRIVATE_FIELDS = ("note",)
_PRIVATE_PROCESS_FIELDS = ("pid",)


def status_json(overview: Overview | None, age_s: float = 0.0, error: str = "") -> bytes:
    """Return what is told to the page.

    Args:
        overview: the last picture; None where there is none yet.
        age_s: how old it is.
        error: why there is no newer one, if there is none.
    """
    daemon = {"age_s": round(age_s, 1), "error": error}
    content = {"daemon": daemon, "overview": None if overview is None else _overview_json(overview)}
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _overview_json(overview: Overview) -> dict[str, Any]:
    fields = to_json_values(overview)
    processes = [_without(each, _PRIVATE_PROCESS_FIELDS) for each in fields["processes"][:_MAX_PROCESSES]]
    return {**_without(fields, _PRIVATE_FIELDS), "processes": processes}


def _without(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
