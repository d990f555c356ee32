"""How far the generations are that load. Nobody tells: it is looked at when something has changed, or is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from weightd.daemon.children.meter import Copied
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Source
from weightd.daemon.generations.states import LOADING, GenerationState
from weightd.daemon.models.model import Model
from weightd.daemon.models.pace import Load, Pace, PaceFigures, Share
from weightd.shared import loading

# Of models that are gone, too: one that comes again has a name that it had.
MOST_PACES = 256

NOTHING = Share()


class Loading:
    """Looks after the generations that load.

    Args:
        copied: called with a model and a source; returns how much of its snapshot was copied, if that is known.

    Attributes:
        paces: how long each model took the last time, by name: the one that was seen last is the last.
    """

    def __init__(self, copied: Callable[[str, Source], Copied | None]) -> None:
        self.paces: dict[str, Pace] = {}
        self._copied = copied
        # By the label of the generation.
        self._loads: dict[str, Load] = {}

    def records(self) -> Iterator[PaceFigures]:
        """Yield what is to be written down for the next daemon."""
        yield from [PaceFigures(model, speed) for model, speed in self.paces.items()]

    def restore(self, records: Sequence[PaceFigures]) -> None:
        """A daemon before this one has seen this."""
        for each in records:
            self._remember(each.model, each.pace)

    def look(self, models: Iterable[Model], now: float) -> None:
        """See how far they are."""
        there = {
            generation.label: (model, generation)
            for model in models
            # Of several models in one process each is copied for itself.
            if model.config.group is None
            for deployment in model.deployments
            for generation in deployment.generations
        }
        for label, (model, generation) in there.items():
            if generation.state in LOADING and generation.state is not GenerationState.RESUMING:
                self._look(label, model, generation, now)
            elif label in self._loads:
                self._ended(label, generation, now)
        self._loads = {label: load for label, load in self._loads.items() if label in there}

    def share(self, label: str, now: float) -> Share:
        """Return how far a generation is; nothing of one that does not load."""
        load = self._loads.get(label)
        return NOTHING if load is None else load.progress(now)

    def told(self, label: str, now: float) -> str:
        """Return the same for people, "" where nothing is known."""
        share = self.share(label, now)
        if share.fraction_done is None and share.fraction_copied is not None:
            return f"{loading.percent(share.fraction_copied)} % copied"
        return loading.progress_text(share.fraction_done, share.remaining_s)

    def _look(self, label: str, model: Model, generation: Life, now: float) -> None:
        load, nbytes = self._loads.get(label), model.snapshot_bytes(generation)
        if load is None:
            load = self._loads[label] = Load(self.paces.get(_name(label)), now)
            if nbytes is not None:
                # It was copied for another one.
                load.on_copied(nbytes, now)
        if not load.is_copied:
            copied = self._copied(model.name, generation.source)
            if copied is not None:
                load.on_copy_progress(*copied)
        if nbytes is not None:
            load.on_copied(nbytes, now)
        if generation.state is not GenerationState.SNAPSHOTTING:
            load.on_load_started(now)

    def _ended(self, label: str, generation: Life, now: float) -> None:
        """It loads no more: if it serves, the next one is known better."""
        load = self._loads.pop(label)
        pace = load.on_serving(now) if generation.state is GenerationState.SERVING else None
        if pace is not None:
            self._remember(_name(label), pace)

    def _remember(self, model: str, pace: Pace) -> None:
        self.paces.pop(model, None)
        self.paces[model] = pace
        while len(self.paces) > MOST_PACES:
            del self.paces[next(iter(self.paces))]


def _name(label: str) -> str:
    """The model's."""
    return label.rpartition(".")[0]
