"""What is asked of a model, as both protocols say it, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class InferenceRequest:
    """An inference request.

    Attributes:
        model: its name.
        inputs: by name, little-endian and in C order: views into what was received. Nobody changes that before the
            answer has come.
        outputs: the names of those that are wanted, in the order in which they shall come; None: all.
        timeout: seconds that the caller waits; None: as long as the gateway does of its own accord.
        priority: 1 goes first; None: the model's default.
        traceparent: of W3C Trace Context, "" where the caller has given none.
        id: what the caller calls it, "" where it has no name.
    """

    model: str
    inputs: Arrays
    outputs: Sequence[str] | None = None
    timeout: float | None = None
    priority: int | None = None
    traceparent: str = ""
    id: str = ""


InferenceResult = Arrays
