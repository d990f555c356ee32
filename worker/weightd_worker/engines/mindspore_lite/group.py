"""Model groups: several models in one process on a card share their workspace, their weights or both.

The workspace is the memory on the card that predicts use. Limits of the library's class ModelGroup, from the source of
MindSpore Lite 2.7, and how this module handles them:

- The library must know all models of the group before it builds the first one. To calculate the size of the workspace,
  it builds each model once, and after the first real build it refuses this calculation until the process exits. So a
  process has one group, which adds all models, calculates the size of the workspace, and then builds the models.
- The library holds the GIL during the calculation, so the process cannot answer pings meanwhile.
- A context object can be used for one build only, so the calculation has a separate context.
- The library identifies a model by the text of its path: two different texts are two models. Versions before 2.1 have
  no ModelGroup.
- Models with a common workspace must not run at the same time, so one thread runs all models, one after another.
- A model in a group cannot share weights with other processes, whatever its options. So it gets no sharing options.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Tuple

from weightd_worker.engines.engine import BuildError, BuildSettings, EngineMissing, OutOfDeviceMemory
from weightd_worker.engines.mindspore_lite.ascend import OUT_OF_MEMORY_MARKS, MindSporeLiteAscend

# The library's ModelGroupFlag.
_FLAGS: Dict[str, str] = {
    "weights": "SHARE_WEIGHT",
    "workspace": "SHARE_WORKSPACE",
    "both": "SHARE_WEIGHT_WORKSPACE",
}

_TOO_OLD = "mindspore_lite {} does not support model groups; install 2.1 or later"


class ModelGroup:
    """All models of a process, which share memory on a card.

    Args:
        device: the card that runs all models, such as "ascend:0".
        share: the memory that the models share: "weights", "workspace" or "both".
        models: path and engine options of each model.

    Attributes:
        engines: an engine for each model. The models are built only by `build`.

    Raises:
        EngineMissing: the library cannot be used, or does not support model groups.
        BuildError: an option, `share` or the device is not valid.
    """

    def __init__(self, device: str, share: str, models: Sequence[Tuple[str, Mapping[str, Any]]]) -> None:
        if share not in _FLAGS:
            raise BuildError(f"models.share: expected one of {', '.join(_FLAGS)}, got {share!r}")
        settings = [BuildSettings(1, device, False, options) for _, options in models]
        card = settings[0].card if settings else None
        if card is None:
            raise BuildError(f"device: a group of models runs on a card, expected ascend:N, got {device!r}")
        self.engines: List[_GroupModel] = [_GroupModel(each, card) for each in settings]
        self._paths = [path for path, _ in models]
        self._flag = _FLAGS[share]
        library = self.engines[0].library
        if not hasattr(library, "ModelGroup"):
            raise EngineMissing(_TOO_OLD.format(library.__version__))

    def build(self) -> None:
        """Add all models to the library's group, calculate the size of the workspace, and build each model.

        Raises:
            BuildError: the library rejects a model. Then no model of the group can be used.
        """
        library, first = self.engines[0].library, self.engines[0]
        with first.log.translate_errors(BuildError):
            self._group = library.ModelGroup(getattr(library.ModelGroupFlag, self._flag))
            self._group.add_model(self._paths)
        try:
            with first.log.translate_errors(BuildError):
                self._group.cal_max_size_of_workspace(library.ModelType.MINDIR, first.context())
        except BuildError as error:
            kind = OutOfDeviceMemory if any(each in str(error) for each in OUT_OF_MEMORY_MARKS) else BuildError
            raise kind(str(error)) from None
        for engine, path in zip(self.engines, self._paths):
            engine.build(path)


class _GroupModel(MindSporeLiteAscend):
    @property
    def library(self) -> Any:
        return self._library

    @property
    def log(self) -> Any:
        return self._log

    def context(self) -> Any:
        """Return a new context, because each build needs its own."""
        return self._context()
