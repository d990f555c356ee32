"""What a model takes and gives, for people and as the Open Inference Protocol's JSON has it."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence

from weightctl.text import clean, table
from weightd_protocol.messages.inference import TensorSignature

# Of a table's column.
_MAX_SHOWN = 3


def summary(tensors: Sequence[TensorSignature]) -> str:
    """Return some tensors in a cell."""
    shown = [f"{clean(each.name)} {each.datatype} {each.shape_text}" for each in tensors[:_MAX_SHOWN]]
    more = [f"and {len(tensors) - _MAX_SHOWN} more"] if len(tensors) > _MAX_SHOWN else []
    return ", ".join([*shown, *more]) or "none"


def format_signature(tensors: Sequence[TensorSignature], indent: str) -> Iterator[str]:
    """Yield a line for each tensor."""
    if tensors:
        yield from table([[clean(each.name), each.datatype, each.shape_text] for each in tensors], 3, indent)
    else:
        yield f"{indent}none"


def as_json(tensors: Sequence[TensorSignature]) -> List[Dict[str, Any]]:
    """Return the same for JSON: a shape that is null is of any rank."""
    shapes = (None if each.shape is None else list(each.shape) for each in tensors)
    return [{"name": each.name, "datatype": each.datatype, "shape": shape} for each, shape in zip(tensors, shapes)]
