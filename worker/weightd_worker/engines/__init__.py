"""Engines by name. The module of an engine imports the engine's library only when an engine object is made.

This package contains the interface of all engines, and all code that is specific to one engine's library. From
weightd_worker it imports only `pagesharing` and `nativelog`.
"""

from __future__ import annotations

from typing import Callable, Dict, Type

from weightd_worker.engines import mindspore_lite
from weightd_worker.engines.engine import BuildSettings, Engine
from weightd_worker.engines.mindspore import MindSporeRank
from weightd_worker.engines.mindspore_lite.ge_rank import MindSporeLiteRank
from weightd_worker.engines.onnxruntime import OnnxRuntime
from weightd_worker.engines.ranks import RankEngine

ENGINES: Dict[str, Callable[[BuildSettings], Engine]] = {
    "onnxruntime": OnnxRuntime,
    "mindspore_lite": mindspore_lite.make_engine,
}
"""For each engine, the function or class that makes it. It raises `EngineMissing`, or `BuildError` for invalid
settings."""

RANK_ENGINES: Dict[str, Type[RankEngine]] = {"mindspore": MindSporeRank, "mindspore_lite": MindSporeLiteRank}
"""Engines that run one rank of a model. Their constructors raise `EngineMissing` or `BuildError`."""
