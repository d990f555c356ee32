"""Imports that take a while, and stay."""

from __future__ import annotations

import contextlib
import gc
from typing import Generator


@contextlib.contextmanager
def gc_disabled() -> Generator[None, None, None]:
    """Look for no garbage among what the block imports: to go through it again and again takes an eighth of the time.

    It stays as long as the process, and no later collection looks at it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
