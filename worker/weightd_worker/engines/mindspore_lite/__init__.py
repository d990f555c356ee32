"""MindSpore Lite, on the CPU and on Ascend cards."""

from __future__ import annotations

from weightd_worker.engines.engine import BuildError, BuildSettings, Engine
from weightd_worker.engines.mindspore_lite.ascend import MindSporeLiteAscend
from weightd_worker.engines.mindspore_lite.cpu import MindSporeLiteCpu
from weightd_worker.engines.mindspore_lite.model import Options
from weightd_worker.engines.mindspore_lite.runner import MindSporeLiteRunner


def make_engine(settings: BuildSettings) -> Engine:
    """Return the MindSpore Lite engine for the device in `settings`.

    Raises:
        EngineMissing: the library cannot be used in this interpreter, or on this host.
        BuildError: the settings are not valid.
    """
    card, is_parallel = settings.card, Options.from_mapping(settings.options).parallel_workers > 1
    if card is None:
        return MindSporeLiteRunner(settings) if is_parallel else MindSporeLiteCpu(settings)
    if is_parallel:
        raise BuildError("options.parallel_workers: expected 1 on a card, where each would have its own weights")
    return MindSporeLiteAscend(settings, card)
