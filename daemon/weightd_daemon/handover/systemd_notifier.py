"""What a service manager is told: when weightd is ready, that it still makes progress, and what it is doing.

Plain decisions, fed with the clock: assignments of sd_notify(3) come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from weightd_common.devices import CPU
from weightd_common.journal_fields import to_one_line
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.models.model import ServedModel
from weightd_protocol.codec import clip

# How often it is looked at what weightd is doing: for people, who read it now and then.
_STATUS_INTERVAL_S = 1.0

# A start is given this much more time at each look at it that finds it going on.
_EXTENSION_S = 15.0

# Beside copying and building, which load_timeout bounds: waiting for room is not bounded but by this.
_PROGRESS_TIMEOUT_S = 120.0

# Three signs of life in the time in which one is expected.
_WATCHDOG_DIVISOR = 3

# systemd ignores a datagram of more than 4096 bytes, whatever else is in it.
_MAX_STATUS_BYTES = 1024

_CONFIG_NOTE = "the configuration file is not in force, see weightctl status"


class SystemdNotifier:
    """Times are monotonic seconds.

    Args:
        watchdog_s: seconds within which a sign of life is expected; None if none is.

    Attributes:
        is_ready: whether every required model has served, but for new ones that failed where others went on.
        next_event_at: nothing is due before this, unless a model changes.
    """

    def __init__(self, watchdog_s: float | None) -> None:
        self.is_ready = False
        self.next_event_at = 0.0
        self._watchdog_interval_s = watchdog_s / _WATCHDOG_DIVISOR if watchdog_s is not None else float("inf")
        self._next_watchdog_at = 0.0 if watchdog_s is not None else float("inf")
        self._status = ""
        # The required models that have served: only what has been there can be missing.
        self._served_models: set[str] = set()
        # What a daemon before this one has served, and this one goes on with.
        self._resumed_models: frozenset[str] = frozenset()
        # Of each model: what it is doing, and since when.
        self._progress: dict[str, tuple[str, float]] = {}

    def on_resumed(self, models: Iterable[str]) -> None:
        """These serve already: what is new beside them and cannot be loaded is no reason to end them."""
        self._resumed_models = frozenset(models)

    def on_suspended(self, seconds: float) -> None:
        """The process did not run for so long: the manager's time went on."""
        self._next_watchdog_at -= seconds

    def poll(
        self,
        models: Iterable[ServedModel],
        now: float,
        note: str = "",
        load_progress: Callable[[GenerationBase], str] = lambda _: "",
    ) -> list[str]:
        """Return what is to be told now: for people whether there is a `note`, and how far models are that load.

        Every user of the host may read the status text of systemd: it names no model, path or cause.
        """
        models = list(models)
        assignments: list[str] = []
        required = [model for model in models if model.config.required]
        self._served_models &= {model.name for model in required}
        self._served_models |= {model.name for model in required if model.is_serving}
        stuck = {model.name for model in required if not self._is_progressing(model, now)}
        if not self.is_ready and all(model.is_serving or self._is_optional(model) for model in required):
            self.is_ready = True
            assignments.append("READY=1")
        if not self.is_ready and not stuck:
            assignments.append(f"EXTEND_TIMEOUT_USEC={int(1e6 * _EXTENSION_S)}")
        if (
            self.is_ready
            and now >= self._next_watchdog_at
            and all(self._is_alive(model, stuck, now) for model in required)
        ):
            self._next_watchdog_at = now + self._watchdog_interval_s
            assignments.append("WATCHDOG=1")
        status = clip(
            to_one_line("; ".join([*([_CONFIG_NOTE] if note else []), *_describe_activity(models, load_progress)])),
            _MAX_STATUS_BYTES,
        )
        if status != self._status:
            self._status = status
            assignments.append(f"STATUS={status}")
        self.next_event_at = now + min(_STATUS_INTERVAL_S, self._watchdog_interval_s)
        return assignments

    def has_failed(self, models: Iterable[ServedModel]) -> bool:
        """Return whether weightd will never be ready."""
        return not self.is_ready and any(
            model.config.required and model.has_failed and not self._is_optional(model) for model in models
        )

    def _is_optional(self, model: ServedModel) -> bool:
        return model.has_failed and bool(self._resumed_models) and model.name not in self._resumed_models

    def _is_alive(self, model: ServedModel, stuck: Collection[str], now: float) -> bool:
        """Whether a worker answers. A daemon whose loop runs while those that are there do not is of no use to anybody.

        One that loads a model, the first time or again, or replaces its workers, is: as long as that goes on, and the
        pauses between two tries are part of it. What a reload has added and what cannot be loaded says nothing of the
        daemon.
        """
        if model.name not in self._served_models or not model.unready_reason(now):
            return True
        return not _has_workers(model) and not model.has_failed and model.name not in stuck

    def _is_progressing(self, model: ServedModel, now: float) -> bool:
        """Whether a model serves or makes progress, as far as its load_timeout allows to tell."""
        previous = self._progress.get(model.name)
        progress = model.main_generation.progress
        if previous is None or previous[0] != progress:
            self._progress[model.name] = progress, now
            return True
        return _has_workers(model) or now <= previous[1] + model.config.load_timeout + _PROGRESS_TIMEOUT_S


def _has_workers(model: ServedModel) -> bool:
    return model.is_serving and any(
        each.serving is not None and each.serving.serving_processes for each in model.deployments
    )


def _describe_activity(models: Iterable[ServedModel], load_progress: Callable[[GenerationBase], str]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    serving = 0
    workers = 0
    for model in models:
        for deployment in model.deployments:
            main = deployment.main_generation
            where = "" if main.device == CPU else f" on {main.device}"
            if main.progress != "serving":
                counts[", ".join(filter(None, [main.progress + where, load_progress(main)]))] += 1
        serving += model.is_serving
        workers += sum(len(each.serving.serving_processes) for each in model.deployments if each.serving is not None)
    for doing, count in counts.items():
        yield f"{count} {'model is' if count == 1 else 'models are'} {doing}"
    yield f"serving {serving} models from {workers} workers"
