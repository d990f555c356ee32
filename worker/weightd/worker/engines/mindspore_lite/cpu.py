"""MindSpore Lite on the CPU.

It rearranges some weights only in the first predict: they are shared because one comes before (`Engine`).
"""

from __future__ import annotations

from typing import Any, Sequence

from weightd.worker.engines.cpu import CpuEngine
from weightd.worker.engines.engine import Settings
from weightd.worker.engines.mindspore_lite.model import MindSporeLite


class MindSporeLiteCpu(MindSporeLite, CpuEngine):
    """Runs a MindIR model on the CPU, where weightd shares pages."""

    def __init__(self, settings: Settings) -> None:
        MindSporeLite.__init__(self, settings)
        CpuEngine.__init__(self, settings)

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a new Model."""
        context = self._context()
        self._begin(handle)
        self._build(model, context, {})

    def _context(self) -> Any:
        context = self._library.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = self._settings.threads
        self._options.set_cpu(context.cpu)
        return context
