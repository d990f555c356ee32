"""Several models of one card in one process, which share their workspace, their weights or both: ModelGroup.

What the library does not do, read in the source of 2.7, and what this module does about it:

- It has to know all of them before the first is built, and builds each once to learn how large it is. After the first
  build that counts it refuses that for ever: there is one group in a process, and its order is add, calculate, build.
- To calculate holds the interpreter's lock, so nothing is answered meanwhile.
- A context belongs to one build: the calculation has one of its own.
- It knows a model again by the text of its path; another text is another model. Before 2.1 it has no groups.
- Models with a common workspace do not overlap; all of them run from one thread here, one after another.
- With a group it shares nothing with other processes, whatever it is told: nothing is told.
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

_TOO_OLD = "mindspore_lite {} has no groups of models; install 2.1 or later"


class ModelGroup:
    """The models of a process.

    Args:
        device: the card of all of them.
        share: what they have in common.
        models: path and options of each.

    Attributes:
        engines: one for each model, of which none is built yet.

    Raises:
        EngineMissing: the library cannot be used, or has no groups.
        BuildError: an option is not one; or nobody can share in this way.
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
        """Add, calculate, and build each.

        Raises:
            BuildError: the library refuses one of them; then there is none of the others either.
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
        """Return one that no build has had."""
        return self._context()
