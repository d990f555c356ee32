"""The properties of each engine that the daemon knows without importing it: an `EngineSpec`, and checks of its files.

This package imports no engine, and of weightd only `platform`, the protocol and the common packages.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightd_daemon.engines import mindspore_lite, onnxruntime
from weightd_daemon.engines.spec import EngineSpec

# Runs the ranks of a divided model, on the CPU and on Ascend cards. The build factor was measured with 2.7.1: 1.8 for
# 96 MiB of matrices, beside the 400 MB of each process.
_MINDSPORE = EngineSpec(
    "mindspore", suffix=".mindir", can_run_on_cards=True, build_factor=2.0, is_ranks_only=True, has_broker=True
)

ENGINES: Mapping[str, EngineSpec] = {each.name: each for each in (onnxruntime.SPEC, mindspore_lite.SPEC, _MINDSPORE)}
"""The engines by name. If several have the same suffix, the first one is its default."""


def engine_for(suffix: str) -> str:
    """Return the name of the engine whose models have that suffix, "" where none has."""
    return next((each.name for each in ENGINES.values() if each.suffix == suffix), "")
