"""The memory plan of a configuration: how much memory models need, and which of them fit into the budget together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common.devices import is_cpu
from weightd_common.log_text import format_mib
from weightd_common.modelfiles.files import ModelFileError, OpenModel
from weightd_daemon.config.load import Config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.counters import DaemonCounterRecord, ModelCounterRecord
from weightd_daemon.handover import counter_store
from weightd_daemon.models.load_progress import LoadSpeedRecord
from weightd_daemon.models.placement import ResourceRequest
from weightd_daemon.models.residency.needs import NeedRecord, estimate_bytes
from weightd_daemon.tenants.usage import UsageRecord

COUNTER_RECORDS: Mapping[str, type[object]] = {
    "account": UsageRecord,
    "model": ModelCounterRecord,
    "daemon": DaemonCounterRecord,
    "load": LoadSpeedRecord,
    "need": NeedRecord,
}
"""The type of each kind of record in the counters file, by the word with which the lines of this kind begin."""


class PlannedModel(NamedTuple):
    """The memory that a model on the CPU needs.

    Attributes:
        name: the name of the model.
        load: when the model is loaded: the configured key `load`.
        nbytes: the bytes that the model needs.
        is_measured: whether a daemon has measured `nbytes`; otherwise `nbytes` is estimated from the size of the
            model's files.
    """

    name: str
    load: str
    nbytes: int
    is_measured: bool


class MemoryPlan(NamedTuple):
    """The result of `plan_memory`: which models fit into the memory budget.

    Attributes:
        models: the models on the CPU, in the order of the configuration.
        budget: the configured `max_model_bytes`; 0: no limit.
        together: the names of the models that fit into the budget together: all that load at the start, then as many
            others as fit, in the order of the configuration.
        never: the names of the models that can never be loaded within the budget.
    """

    models: tuple[PlannedModel, ...]
    budget: int
    together: tuple[str, ...]
    never: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the lines of a text that describes the plan."""
        for each in self.models:
            source = "measured" if each.is_measured else "estimated"
            yield f"plan: {each.name}: load = {each.load}, needs {format_mib(each.nbytes)} ({source})"
        total = format_mib(sum(each.nbytes for each in self.models))
        if not self.budget:
            yield f"plan: all models together need {total}; there is no budget (max_model_bytes)"
            return
        yield f"plan: the budget is {format_mib(self.budget)}, all models together need {total}"
        waiting = [each.name for each in self.models if each.name not in (*self.together, *self.never)]
        yield f"plan: loaded together: {', '.join(self.together) or 'none'}"
        if waiting:
            yield f"plan: loaded only after others are unloaded: {', '.join(waiting)}"
        for name in self.never:
            yield f"plan: {name} can never be loaded"


def plan_memory(config: Config) -> MemoryPlan:
    """Return the memory plan of a valid configuration; it omits models on cards, which the budget does not cover."""
    needs = _measured_needs(config.daemon.counters_file)
    models = tuple(
        _plan_model(name, model, needs.get(name))
        for name, model in config.models.items()
        if all(map(is_cpu, model.devices)) and model.ranks is None
    )
    budget = config.daemon.max_model_bytes
    pinned = [each for each in models if config.models[each.name].loads_at_start]
    pinned_bytes = sum(each.nbytes for each in pinned)
    together, used = [each.name for each in pinned], pinned_bytes
    for each in models:
        if each not in pinned and (not budget or used + each.nbytes <= budget):
            together.append(each.name)
            used += each.nbytes
    never = [each.name for each in models if budget and each not in pinned and pinned_bytes + each.nbytes > budget]
    if budget and pinned_bytes > budget:
        never += [each.name for each in pinned]
    return MemoryPlan(models, budget, tuple(together), tuple(never))


def _plan_model(name: str, model: ModelConfig, measured: NeedRecord | None) -> PlannedModel:
    try:
        with OpenModel(Path(model.path)) as files:
            file_bytes = sum(each.nbytes for each in files.files)
    except (ModelFileError, OSError):
        file_bytes = 0
    if measured is not None and measured.file_bytes == file_bytes:
        return PlannedModel(name, model.load, measured.nbytes, is_measured=True)
    requests = (_request(model, file_bytes, devices) for devices in model.devices_by_weight_copy.values())
    return PlannedModel(name, model.load, sum(map(estimate_bytes, requests)), is_measured=False)


def _request(model: ModelConfig, file_bytes: int, devices: Sequence[str]) -> ResourceRequest:
    """Return the memory and processes that a model needs on devices that share one copy of the weights."""
    worker_count = (model.max_workers + (model.spares or 0)) * len(devices)
    copy_count = worker_count if model.sharing == "off" else 1
    return ResourceRequest(file_bytes, copy_count, worker_count, 1 + worker_count, 0)


def _measured_needs(path: Path) -> dict[str, NeedRecord]:
    try:
        records = counter_store.read(path, COUNTER_RECORDS)["need"]
    except (OSError, counter_store.CounterStoreError):
        return {}
    return {each.model: each for each in records}
