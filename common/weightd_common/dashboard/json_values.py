"""The picture as plain values, for programs and for the status page: rounded to what can be seen."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

from weightd_common.dashboard.memory import MemoryUsage
from weightd_common.dashboard.rows import ModelRow, Overview, Throughput


def to_json_values(overview: Overview) -> Dict[str, Any]:
    """Return what JSON can hold; seconds and bytes, as the rows have them."""
    return {
        **_field_values(overview),
        "uptime_s": round(overview.uptime_s, 1),
        "throughput": _throughput_values(overview.throughput),
        "memory": _memory_values(overview.memory),
        "models": [_model_values(each) for each in overview.models],
        "processes": [_field_values(each) for each in overview.processes],
        "tenants": [_field_values(each) for each in overview.tenants],
    }


def _model_values(row: ModelRow) -> Dict[str, Any]:
    return {
        **_field_values(row),
        "throughput": _throughput_values(row.throughput),
        "memory": _memory_values(row.memory),
    }


def _throughput_values(throughput: Throughput) -> Dict[str, Any]:
    """Rates and times of moments are two lists: half as long as if each had its name."""
    return {
        "rate": _rounded(throughput.rate),
        "p50_s": _rounded(throughput.p50_s),
        "p99_s": _rounded(throughput.p99_s),
        "rates": [_rounded(each.rate) for each in throughput.rate_points],
        "p99s_s": [_rounded(each.p99_s) for each in throughput.rate_points],
    }


def _memory_values(memory: Optional[MemoryUsage]) -> Optional[Dict[str, int]]:
    return None if memory is None else {**_field_values(memory), "total_bytes": memory.total_bytes}


def _field_values(row: Any) -> Dict[str, Any]:
    found = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def _rounded(value: Optional[float]) -> Optional[float]:
    return None if value is None else float(f"{value:.4g}")
