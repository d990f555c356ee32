"""The key `workers` of a model: a number of worker processes, or a table with the bounds of this number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weightd_common.toml_schema import MAX_SECONDS
from weightd_protocol import limits, schema
from weightd_protocol.schema import FieldError, FieldType, describe_value, integer, number, record

_MAX_WORKERS = 1024

_COUNT = integer(1, _MAX_WORKERS)

_EXPECTED = f"integer, 1 to {_MAX_WORKERS}, or a table with min and max"


@dataclass(frozen=True)
class WorkerRange:
    """The range of the number of workers, which weightd adapts to the load.

    Attributes:
        min: the minimum number of workers on each device.
        max: the maximum number of workers on each device.
        idle: seconds without a request after which a worker beyond `min` is stopped. The default is longer than usual
            pauses of interactive use.
    """

    min: int = field(metadata=_COUNT)
    max: int = field(metadata=_COUNT)
    idle: float = field(default=30.0, metadata=number(MAX_SECONDS, positive=True))


WorkersSetting = int | WorkerRange

_COUNT_KIND = _COUNT["field_type"]
_RANGE_KIND = record(WorkerRange)["field_type"]


def field_metadata() -> dict[str, FieldType]:
    """Return the dataclass metadata that parses the field `workers`."""
    items = limits.CONTAINER_ITEMS + schema.max_record_items(WorkerRange)
    return {"field_type": FieldType(_check, _check, _to_plain, _EXPECTED, items=items)}


def _check(value: Any) -> WorkersSetting:
    if type(value) is int:
        count: int = _COUNT_KIND.check(value)
        return count
    if type(value) is not dict:
        raise FieldError(f"expected {_EXPECTED}, got {describe_value(value)}")
    bounds: WorkerRange = _RANGE_KIND.check(value)
    if bounds.max < bounds.min:
        raise FieldError(f"expected at least min, {bounds.min}, got {bounds.max}").at(".max")
    return bounds


def _to_plain(value: Any) -> Any:
    return _RANGE_KIND.plain(value) if isinstance(value, WorkerRange) else _COUNT_KIND.plain(value)
