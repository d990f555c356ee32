"""How far the generations are that load. Nobody tells: it is looked at when something has changed, or is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weightd_common import log_text
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import LOADING, GenerationState
from weightd_daemon.models.load_progress import LoadEstimate, LoadProgress, LoadSpeed, LoadSpeedRecord
from weightd_daemon.models.model import ServedModel
from weightd_daemon.processes.snapshotter import CopyProgress

# Of models that are gone, too: one that comes again has a name that it had.
MAX_SPEEDS = 256

NO_PROGRESS = LoadProgress()


class LoadMonitor:
    """Looks after the generations that load.

    Args:
        copy_progress: called with a model and a source; returns how much of its snapshot was copied, if that is known.

    Attributes:
        speeds: how long each model took the last time, by name: the one that was seen last is the last.
    """

    def __init__(self, copy_progress: Callable[[str, ModelSource], CopyProgress | None]) -> None:
        self.speeds: dict[str, LoadSpeed] = {}
        self._copy_progress = copy_progress
        self._has_changed = True
        # By the label of the generation.
        self._loads: dict[str, LoadEstimate] = {}

    def records(self) -> Iterator[LoadSpeedRecord]:
        """Yield what is to be written down for the next daemon."""
        yield from [LoadSpeedRecord(model, speed) for model, speed in self.speeds.items()]

    def restore(self, records: Sequence[LoadSpeedRecord]) -> None:
        """A daemon before this one has seen this."""
        for each in records:
            self._remember_speed(each.model, each.speed)

    def on_change(self) -> None:
        """A generation is not what it was."""
        self._has_changed = True

    def update_if_changed(self, models: Iterable[ServedModel], now: float) -> None:
        """See how far they are, if anything has changed since that was seen last."""
        if self._has_changed:
            self.update(models, now)

    def update(self, models: Iterable[ServedModel], now: float) -> None:
        """See how far they are."""
        self._has_changed = False
        by_label = {
            generation.label: (model, generation)
            for model in models
            # Of several models in one process each is copied for itself.
            if model.config.group is None
            for generation in model.deployments.generations
        }
        for label, (model, generation) in by_label.items():
            if generation.state in LOADING and generation.state is not GenerationState.RESUMING:
                self._update_load(label, model, generation, now)
            elif label in self._loads:
                self._on_load_end(label, generation, now)
        self._loads = {label: load for label, load in self._loads.items() if label in by_label}

    def progress(self, label: str, now: float) -> LoadProgress:
        """Return how far a generation is; nothing of one that does not load."""
        load = self._loads.get(label)
        return NO_PROGRESS if load is None else load.progress(now)

    def describe_progress(self, label: str, now: float) -> str:
        """Return the same for people, "" where nothing is known."""
        progress = self.progress(label, now)
        return copied_text(progress) or log_text.progress_text(progress.fraction_done, progress.remaining_s)

    def _update_load(self, label: str, model: ServedModel, generation: GenerationBase, now: float) -> None:
        load, snapshots = self._loads.get(label), model.versions.snapshots
        snapshot = snapshots.find(generation.source)
        nbytes = None if snapshot is None else snapshot.nbytes
        if load is None:
            load = self._loads[label] = LoadEstimate(self.speeds.get(_model_of_label(label)), now)
            if nbytes is not None:
                # It was copied for another one.
                load.on_copied(nbytes, now)
        if not load.is_copied:
            copy_progress = self._copy_progress(model.name, generation.source)
            if copy_progress is not None:
                load.on_copy_progress(*copy_progress)
        if nbytes is not None:
            load.on_copied(nbytes, now)
        if generation.state is not GenerationState.SNAPSHOTTING:
            load.on_load_started(now)

    def _on_load_end(self, label: str, generation: GenerationBase, now: float) -> None:
        """It loads no more: if it serves, the next one is known better."""
        load = self._loads.pop(label)
        speed = load.on_serving(now) if generation.state is GenerationState.SERVING else None
        if speed is not None:
            self._remember_speed(_model_of_label(label), speed)

    def _remember_speed(self, model: str, speed: LoadSpeed) -> None:
        self.speeds.pop(model, None)
        self.speeds[model] = speed
        while len(self.speeds) > MAX_SPEEDS:
            del self.speeds[next(iter(self.speeds))]


def copied_text(progress: LoadProgress) -> str:
    """Return how much of a generation's files is there, where no more is known of how long it takes; else ""."""
    if progress.fraction_done is not None or progress.fraction_copied is None:
        return ""
    return f"{log_text.percent(progress.fraction_copied)} % copied"


def _model_of_label(label: str) -> str:
    """The model's."""
    return label.rpartition(".")[0]
