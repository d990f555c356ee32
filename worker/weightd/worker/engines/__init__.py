"""The engines by name. Each lives in its own module and imports its library only when it is made."""

from __future__ import annotations

from typing import Callable, Dict

from weightd.worker.engines.base import Engine, Settings
from weightd.worker.engines.mindspore_lite import MindSporeLite
from weightd.worker.engines.onnxruntime import OnnxRuntime

ENGINES: Dict[str, Callable[[Settings], Engine]] = {
    OnnxRuntime.name: OnnxRuntime,
    MindSporeLite.name: MindSporeLite,
}
