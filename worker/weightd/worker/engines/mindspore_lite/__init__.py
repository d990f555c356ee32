"""MindSpore Lite, on the CPU and on Ascend cards."""

from __future__ import annotations

from weightd.worker.engines.engine import Engine, Settings
from weightd.worker.engines.mindspore_lite.ascend import MindSporeLiteAscend
from weightd.worker.engines.mindspore_lite.cpu import MindSporeLiteCpu


def make(settings: Settings) -> Engine:
    """Return the engine for the device of these settings.

    Raises:
        EngineMissing: it cannot be used in this interpreter, or on this machine.
        BuildError: the settings cannot be.
    """
    return MindSporeLiteCpu(settings) if settings.card is None else MindSporeLiteAscend(settings, settings.card)
