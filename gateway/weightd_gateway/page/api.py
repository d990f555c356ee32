"""The data of the status page as JSON."""

from __future__ import annotations

import json
from typing import Any

from weightd_common.dashboard.overview import Overview, to_json_values

# Maximum number of processes in status.json, so that a browser can display all of them.
_MAX_PROCESSES = 1024

# Fields that are not sent to the page, because they contain process ids or paths of this host.
_PRIVATE_FIELDS = ("note",)
_PRIVATE_PROCESS_FIELDS = ("pid",)


def status_json(overview: Overview | None, age_s: float = 0.0, error: str = "") -> bytes:
    """Return the content of status.json.

    Args:
        overview: the latest state of models, processes and tenants; None before the first response of the daemon.
        age_s: the age of the overview in seconds.
        error: the reason why the overview could not be refreshed; "" if it is current.
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
