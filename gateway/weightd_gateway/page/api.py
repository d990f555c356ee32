"""The data of the status page as JSON."""

from __future__ import annotations

import json
from typing import Any

from weightd_common.dashboard.overview import Overview, to_json_values

# Limit of processes on the page, for the browser's sake.
_MAX_PROCESSES = 1024

# Fields with numbers and paths of this host, which the viewers of the page should not see.
_PRIVATE_FIELDS = ("note",)
_PRIVATE_PROCESS_FIELDS = ("pid",)


def status_json(overview: Overview | None, age_s: float = 0.0, error: str = "") -> bytes:
    """Return the content of status.json.

    Args:
        overview: the latest overview; None before the first one.
        age_s: its age in seconds.
        error: the reason why the overview could not be refreshed; "" if it was.
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
