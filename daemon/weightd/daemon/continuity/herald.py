"""What a service manager is told: when weightd is ready, that it still makes progress, and what it is doing.

Plain decisions, fed with the clock: assignments of sd_notify(3) come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from weightd.daemon.generations.life import Life
from weightd.daemon.models.model import Model
from weightd.protocol.codec import clip
from weightd.shared.devices import CPU
from weightd.shared.journal import flat

# How often it is looked at what weightd is doing: for people, who read it now and then.
_STATUS_S = 1.0

# A start is given this much more time at each look at it that finds it going on.
_EXTENSION_S = 15.0

# Beside copying and building, which load_timeout bounds: waiting for room is not bounded but by this.
_PATIENCE_S = 120.0

# Three signs of life in the time in which one is expected.
_SIGNS = 3

# systemd ignores a datagram of more than 4096 bytes, whatever else is in it.
_STATUS_BYTES = 1024

_NOTE = "the configuration file is not in force, see weightctl status"


class Herald:
    """Times are monotonic seconds.

    Args:
        watchdog: seconds within which a sign of life is expected; None if none is.

    Attributes:
        ready: whether every required model has served, but for new ones that failed where others went on.
        next_event: nothing is due before this, unless a model changes.
    """

    def __init__(self, watchdog: float | None) -> None:
        self.ready = False
        self.next_event = 0.0
        self._sign_interval = watchdog / _SIGNS if watchdog is not None else float("inf")
        self._next_sign = 0.0 if watchdog is not None else float("inf")
        self._status = ""
        # The required models that have served: only what has been there can be missing.
        self._served: set[str] = set()
        # What a daemon before this one has served, and this one goes on with.
        self._resumed: frozenset[str] = frozenset()
        # Of each model: what it is doing, and since when.
        self._progress: dict[str, tuple[str, float]] = {}

    def resumed(self, models: Iterable[str]) -> None:
        """These serve already: what is new beside them and cannot be loaded is no reason to end them."""
        self._resumed = frozenset(models)

    def paused(self, seconds: float) -> None:
        """The process did not run for so long: the manager's time went on."""
        self._next_sign -= seconds

    def look(
        self, models: Iterable[Model], now: float, note: str = "", far: Callable[[Life], str] = lambda _: ""
    ) -> list[str]:
        """Return what is to be told now: for people whether there is a `note`, and how far models are that load.

        Every user of the host may read the status text of systemd: it names no model, path or cause.
        """
        models = list(models)
        told: list[str] = []
        required = [model for model in models if model.config.required]
        self._served &= {model.name for model in required}
        self._served |= {model.name for model in required if model.is_serving}
        stuck = {model.name for model in required if not self._goes_on(model, now)}
        if not self.ready and all(model.is_serving or self._is_optional(model) for model in required):
            self.ready = True
            told.append("READY=1")
        if not self.ready and not stuck:
            told.append(f"EXTEND_TIMEOUT_USEC={int(1e6 * _EXTENSION_S)}")
        if self.ready and now >= self._next_sign and all(self._lives(model, stuck, now) for model in required):
            self._next_sign = now + self._sign_interval
            told.append("WATCHDOG=1")
        status = clip(flat("; ".join([*([_NOTE] if note else []), *_doing(models, far)])), _STATUS_BYTES)
        if status != self._status:
            self._status = status
            told.append(f"STATUS={status}")
        self.next_event = now + min(_STATUS_S, self._sign_interval)
        return told

    def failed(self, models: Iterable[Model]) -> bool:
        """Return whether weightd will never be ready."""
        return not self.ready and any(
            model.config.required and model.has_failed and not self._is_optional(model) for model in models
        )

    def _is_optional(self, model: Model) -> bool:
        return model.has_failed and bool(self._resumed) and model.name not in self._resumed

    def _lives(self, model: Model, stuck: Collection[str], now: float) -> bool:
        """Whether a worker answers. A daemon whose loop runs while those that are there do not is of no use to anybody.

        One that loads a model, the first time or again, or replaces its workers, is: as long as that goes on, and the
        pauses between two tries are part of it. What a reload has added and what cannot be loaded says nothing of the
        daemon.
        """
        if model.name not in self._served or not model.unready_reason(now):
            return True
        return not _has_workers(model) and not model.has_failed and model.name not in stuck

    def _goes_on(self, model: Model, now: float) -> bool:
        """Whether a model serves or makes progress, as far as its load_timeout allows to tell."""
        before = self._progress.get(model.name)
        progress = model.main_generation.progress
        if before is None or before[0] != progress:
            self._progress[model.name] = progress, now
            return True
        return _has_workers(model) or now <= before[1] + model.config.load_timeout + _PATIENCE_S


def _has_workers(model: Model) -> bool:
    return model.is_serving and any(each.serving is not None and each.serving.serving_processes for each in model.deployments)


def _doing(models: Iterable[Model], far: Callable[[Life], str]) -> Iterator[str]:
    others: Counter[str] = Counter()
    serving = 0
    workers = 0
    for model in models:
        for deployment in model.deployments:
            main = deployment.main_generation
            where = "" if main.device == CPU else f" on {main.device}"
            if main.progress != "serving":
                others[", ".join(filter(None, [main.progress + where, far(main)]))] += 1
        serving += model.is_serving
        workers += sum(len(each.serving.serving_processes) for each in model.deployments if each.serving is not None)
    for doing, count in others.items():
        yield f"{count} {'model is' if count == 1 else 'models are'} {doing}"
    yield f"serving {serving} models from {workers} workers"
