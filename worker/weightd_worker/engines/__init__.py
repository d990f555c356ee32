"""Engines by name. Each engine has its module, which imports the engine's library only when an engine is made.

Code that is specific to one library belongs here, and the interface of all engines. Of weightd_worker this package
imports only `pagesharing` and `nativelog`.
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
"""Factories of the engines. They raise `EngineMissing` or, for invalid settings, `BuildError`."""

RANK_ENGINES: Dict[str, Type[RankEngine]] = {"mindspore": MindSporeRank, "mindspore_lite": MindSporeLiteRank}
"""Engines of the ranks of a model. Their constructors raise the same errors."""
