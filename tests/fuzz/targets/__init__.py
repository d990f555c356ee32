"""Fuzz targets: modules with a function `one_input` that raises if weightd violates a guarantee.

The targets do not depend on a fuzzer. The same bytes give the same run, because no state outlives an input.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

NAMES = ("framing", "zmtp", "decoder", "channel", "store", "config")


class Target(NamedTuple):
    """A loaded target module."""

    one_input: Callable[[bytes], None]
    words: tuple[bytes, ...]
    """Words that inputs are likely to contain and that a fuzzer would take long to guess."""
    max_bytes: int
    """The maximum length: longer inputs take more time and find nothing new."""


def load(name: str) -> Target:
    """Import one of `NAMES` and the modules that it fuzzes."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Target(module.one_input, module.WORDS, module.MAX_BYTES)
