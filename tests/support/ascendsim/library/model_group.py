"""`ModelGroup`: sharing inside of one process, which silently switches off sharing between processes.

What the models of a group share in the card's memory is not simulated: each takes its own.
"""

from __future__ import annotations

import enum
from typing import Any, List

from ascendsim.library import check, native
from ascendsim.library.context import Context
from ascendsim.library.model import Model, ModelType


class ModelGroupFlag(enum.Enum):
    SHARE_WEIGHT = 1
    SHARE_WORKSPACE = 2
    SHARE_WEIGHT_WORKSPACE = 3


class ModelGroup:
    """A group of files, or with SHARE_WEIGHT of `Model` objects (which only "ge" looks at)."""

    def __init__(self, flags: ModelGroupFlag = ModelGroupFlag.SHARE_WORKSPACE) -> None:
        check.instance("flags", flags, ModelGroupFlag)
        self._flags = flags
        self._paths: List[str] = []

    def add_model(self, models: List[Any]) -> None:
        check.instance("models", models, list)
        if not models:
            raise RuntimeError("ModelGroup's add model failed, model is empty list.")
        kind = str if isinstance(models[0], str) else Model
        check.elements("models", models, kind)
        if kind is Model and self._flags is not ModelGroupFlag.SHARE_WEIGHT:
            raise RuntimeError("ModelGroup's add model failed, only SHARE_WEIGHT takes Model objects.")
        if kind is str:
            self._paths += models
            native.grouped_paths.update(models)

    def cal_max_size_of_workspace(self, model_type: ModelType, context: Context) -> None:
        check.instance("model_type", model_type, ModelType)
        check.instance("context", context, Context)
        if context.ascend.provider == "ge" or not self._paths:
            raise RuntimeError("ModelGroup's cal max size of workspace failed! Error is Common error code.")
