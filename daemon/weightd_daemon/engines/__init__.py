"""Properties of each engine that need no import of the engine: an `EngineSpec`, and checks of model files.

This package imports no engine. Of weightd it imports only `platform`, the protocol and the common packages.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightd_daemon.engines import mindspore_lite, onnxruntime
from weightd_daemon.engines.spec import EngineSpec

# MindSpore runs only models with ranks, on the CPU and on Ascend cards. Measured with version 2.7.1: a build of 96 MiB
# of matrices takes 1.8 times this size, in addition to the 400 MB of each process.
_MINDSPORE = EngineSpec(
    "mindspore", suffix=".mindir", can_run_on_cards=True, build_factor=2.0, is_ranks_only=True, has_broker=True
)

ENGINES: Mapping[str, EngineSpec] = {each.name: each for each in (onnxruntime.SPEC, mindspore_lite.SPEC, _MINDSPORE)}
"""The engines by name. If several engines have the same suffix, the first one is the default for this suffix."""


def engine_for(suffix: str) -> str:
    """Return the name of the default engine for model files with a suffix; "" for an unknown suffix."""
    return next((each.name for each in ENGINES.values() if each.suffix == suffix), "")
