"""What is fuzzed: modules with a function `one_input`, which raises where weightd does not keep its word.

They know nothing of a fuzzer. The same bytes give the same run: no state is left between two inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

NAMES = ("framing", "zmtp", "decoder", "store", "config")


class Target(NamedTuple):
    """One of the modules, loaded."""

    one_input: Callable[[bytes], None]
    words: tuple[bytes, ...]
    """What inputs are likely to contain: a fuzzer would take long to guess it."""
    max_bytes: int
    """Longer inputs find nothing that shorter ones do not, and take longer."""


def load(name: str) -> Target:
    """Import one of `NAMES`, and with it what it fuzzes."""
    module = importlib.import_module(f"{__name__}.{name}")
    return Target(module.one_input, module.WORDS, module.MAX_BYTES)
