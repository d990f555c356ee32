"""Progress of loading generations, sampled after each change of a generation and for each status request.

The progress is sampled, because generations do not report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weightd_common import log_text
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import LOADING, GenerationState
from weightd_daemon.models.load_progress import LoadEstimate, LoadProgress, LoadSpeed, LoadSpeedRecord
from weightd_daemon.models.model import ServedModel
from weightd_daemon.processes.snapshotter import CopyProgress

# Maximum number of models whose load speed is remembered. Removed models are remembered, too, because a reload may add
# a model again.
MAX_SPEEDS = 256

NO_PROGRESS = LoadProgress()


class LoadMonitor:
    """Monitor of the progress of loading generations.

    Args:
        copy_progress: called with a model's name and the source of its files; returns how much of the snapshot has been
            copied, or None if this is unknown.

    Attributes:
        speeds: by model name, how long the model's last load took; the most recent load is the last entry.
    """

    def __init__(self, copy_progress: Callable[[str, ModelSource], CopyProgress | None]) -> None:
        self.speeds: dict[str, LoadSpeed] = {}
        self._copy_progress = copy_progress
        self._has_changed = True
        # By generation label.
        self._loads: dict[str, LoadEstimate] = {}

    def records(self) -> Iterator[LoadSpeedRecord]:
        """Yield the load speeds as records for the counter store."""
        yield from [LoadSpeedRecord(model, speed) for model, speed in self.speeds.items()]

    def restore(self, records: Sequence[LoadSpeedRecord]) -> None:
        """Add the load speeds that an earlier daemon has measured, from the counter store."""
        for each in records:
            self._remember_speed(each.model, each.speed)

    def on_change(self) -> None:
        """Make the next `update_if_changed` update the progress, because a generation has changed its state."""
        self._has_changed = True

    def update_if_changed(self, models: Iterable[ServedModel], now: float) -> None:
        """Update the progress if a generation has changed its state since the last update."""
        if self._has_changed:
            self.update(models, now)

    def update(self, models: Iterable[ServedModel], now: float) -> None:
        """Update the progress of all loading generations."""
        self._has_changed = False
        by_label = {
            generation.label: (model, generation)
            for model in models
            # Skip model groups: each model's files are copied separately, so their common processes have no single
            # progress.
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
        """Return the progress of the generation with this label; `NO_PROGRESS` if it is not loading."""
        load = self._loads.get(label)
        return NO_PROGRESS if load is None else load.progress(now)

    def describe_progress(self, label: str, now: float) -> str:
        """Return the progress of the generation with this label in words; "" if it is unknown."""
        progress = self.progress(label, now)
        return copied_text(progress) or log_text.progress_text(progress.fraction_done, progress.remaining_s)

    def _update_load(self, label: str, model: ServedModel, generation: GenerationBase, now: float) -> None:
        load, snapshots = self._loads.get(label), model.versions.snapshots
        snapshot = snapshots.find(generation.source)
        nbytes = None if snapshot is None else snapshot.nbytes
        if load is None:
            load = self._loads[label] = LoadEstimate(self.speeds.get(_model_of_label(label)), now)
            if nbytes is not None:
                # The snapshot already exists, because another generation has used it.
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
        """Drop the estimate of a generation that no longer loads. If the generation serves, remember its load speed."""
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
    """Return how much of a generation's files is copied, in words; "" if it is unknown.

    The result is also "" if the total progress is known, because the total includes the copying.
    """
    if progress.fraction_done is not None or progress.fraction_copied is None:
        return ""
    return f"{log_text.percent(progress.fraction_copied)} % copied"


def _model_of_label(label: str) -> str:
    """Return the name of the model to which a generation with this label belongs."""
    return label.rpartition(".")[0]
