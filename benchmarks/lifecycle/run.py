"""The benchmark `lifecycle`: its parts, its results and their bounds."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import material
from benchmarks.lifecycle import cold, hot, registered
from benchmarks.lifecycle.material import WIDTH, FactorModels
from benchmarks.lifecycle.zipf import MemoryProbe, ZipfClients, lru_hit_rate
from benchmarks.material import CONV, CONV_SHAPE, ENGINES, MLP, MLP_WIDTH, Setup, UnavailableError
from benchmarks.report import MB, Result, Target, percentile, progress
from testkit.service import Service

WORKERS = 1
MODELS, MODEL_MIB = 200, 30
BUDGET = 1_500_000_000
CLIENTS = 4
MINUTES, QUICK_MINUTES = 10.0, 1.0

# Codes with which a request may fail under pressure: the limits that cause them are configured.
_ALLOWED_ERRORS = frozenset({"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"})

_BOUNDS: Mapping[str, Target] = {
    each.key: each
    for each in (
        Target("zipf_wrong_answers", 0),
        Target("zipf_other_errors", 0),
        Target("zipf_reserved_ratio", 1.0),
        Target("zipf_lru_ratio", 0.95, at_least=True),
        Target("hot_ratio", 3.0),
        Target("cold_large_again_ratio", 1.3),
        Target("cold_large_first_ratio", 1.3),
        Target("cold_small_again_extra_ms", 100.0),
        Target("cold_small_first_extra_ms", 100.0),
        Target("registered_daemon_extra_mb", 20.0),
        Target("registered_start_s", 2.0),
        Target("registered_cpu_percent", 0.2),
        Target("tiny_before_mb", 60.0),
        Target("tiny_after_mb", 60.0),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifecycle(Result):
    """Figures of models that load on demand. A figure is None if its part was not measured.

    Attributes:
        zipf_requests: requests to `MODELS` models by Zipf's law, whose memory exceeds the budget several times.
        zipf_wrong_answers: answers that are not the requested model's.
        zipf_errors: failed requests by code.
        zipf_other_errors: failed requests with codes that no configured limit causes.
        zipf_reserved_ratio: the most bytes that were reserved at once, for the budget.
        zipf_pss_ratio: the most bytes of all processes of the service at once, for the budget.
        zipf_hit_rate: requests that caused no load, for all requests.
        zipf_lru_rate: the hit rate of an LRU cache of the same budget for the same requests.
        zipf_lru_ratio: `zipf_hit_rate` for `zipf_lru_rate`.
        zipf_p50_ms: time until the answer.
        zipf_p99_ms: the same.
        hot_alone_p99_us: a loaded model, while no other model loads.
        hot_loading_p99_us: the same model while other models load and unload.
        hot_ratio: `hot_loading_p99_us` for `hot_alone_p99_us`.
        hot_loads_per_s: these loads.
        cold_large_first_ratio: first answer of a model of 192 MiB that the daemon has never loaded, for build and run
            in a process that has loaded the engine.
        cold_large_again_ratio: the same for a model that was loaded before and unloaded.
        cold_small_first_extra_ms: first answer of a model of 10 MB that the daemon has never loaded, minus build and
            run.
        cold_small_again_extra_ms: the same for a model that was loaded before and unloaded.
        registered_daemon_extra_mb: memory of a daemon with 1,000 unloaded models, minus that with one.
        registered_start_s: time until its socket answers.
        registered_cpu_percent: CPU time of all its processes at rest.
        tiny_before_mb: PSS of a service with 20 tiny unloaded models, before the first request.
        tiny_after_mb: the same after each model was loaded and unloaded again.
        lines: the rows of the table.
    """

    benchmark = "lifecycle"
    zipf_requests: int | None = None
    zipf_wrong_answers: int | None = None
    zipf_errors: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    zipf_other_errors: int | None = None
    zipf_reserved_ratio: float | None = None
    zipf_pss_ratio: float | None = None
    zipf_hit_rate: float | None = None
    zipf_lru_rate: float | None = None
    zipf_lru_ratio: float | None = None
    zipf_p50_ms: float | None = None
    zipf_p99_ms: float | None = None
    hot_alone_p99_us: float | None = None
    hot_loading_p99_us: float | None = None
    hot_ratio: float | None = None
    hot_loads_per_s: float | None = None
    cold_large_first_ratio: float | None = None
    cold_large_again_ratio: float | None = None
    cold_small_first_extra_ms: float | None = None
    cold_small_again_extra_ms: float | None = None
    registered_daemon_extra_mb: float | None = None
    registered_start_s: float | None = None
    registered_cpu_percent: float | None = None
    tiny_before_mb: float | None = None
    tiny_after_mb: float | None = None
    lines: Sequence[tuple[str, str]] = ()

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the figures that were measured."""
        return [each for key, each in _BOUNDS.items() if getattr(self, key) is not None]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return self.lines


def run(setup: Setup) -> Lifecycle:
    """Measure the selected parts, or all of them."""
    if setup.engine != ENGINES[0]:
        raise UnavailableError(f"lifecycle measures {ENGINES[0]} only")
    values: dict[str, Any] = {}
    lines: list[tuple[str, str]] = []
    number = 0
    for part in setup.parts or PARTS:
        number += PARTS[part](setup, values, lines)
    return Lifecycle(engine=setup.engine, workers=setup.workers, n=number, lines=tuple(lines), **values)


def _zipf(setup: Setup, values: dict[str, Any], lines: list[tuple[str, str]]) -> int:
    count = setup.models if setup.models > 1 else MODELS
    minutes = QUICK_MINUTES if setup.quick else MINUTES
    progress(f"{count} models of {MODEL_MIB} MB, {minutes:g} min")
    models = FactorModels(count, MODEL_MIB)
    inputs = material.inputs(WIDTH)
    answers = models.answers(setup.engine, inputs)
    table = {"load": "on_demand", "workers": setup.workers}
    tables = {name: {**table, "path": path} for name, path in models.paths.items()}
    with Service(tables, {"max_model_bytes": BUDGET}) as service:
        with MemoryProbe(service) as probe, ZipfClients(service, inputs, answers, clients=CLIENTS) as clients:
            time.sleep(60 * minutes)
        load_count = service.log.count(": loading, requested by")
    sent = sorted(clients.sent)
    needs = collections.defaultdict(lambda: round(statistics.median(probe.needs.values())), probe.needs)
    lru_rate = lru_hit_rate([each.model for each in sent], needs, BUDGET)
    hit_rate = 1 - load_count / len(sent)
    errors = collections.Counter(each.error for each in sent if each.error)
    values.update(
        zipf_requests=len(sent),
        zipf_wrong_answers=clients.wrong_answers,
        zipf_errors=dict(errors),
        zipf_other_errors=sum(number for code, number in errors.items() if code not in _ALLOWED_ERRORS),
        zipf_reserved_ratio=probe.max_reserved / BUDGET,
        zipf_pss_ratio=max(probe.pss) / BUDGET,
        zipf_hit_rate=hit_rate,
        zipf_lru_rate=lru_rate,
        zipf_lru_ratio=hit_rate / lru_rate,
        zipf_p50_ms=1e3 * percentile([each.seconds for each in sent], 50),
        zipf_p99_ms=1e3 * percentile([each.seconds for each in sent], 99),
    )
    lines += [
        ("Zipf requests", f"{len(sent):,}, {clients.wrong_answers} wrong, errors {dict(errors)}"),
        ("… loads", f"{load_count:,}   hit rate {hit_rate:.3f}, LRU {lru_rate:.3f}"),
        ("… a model", f"{statistics.median(probe.needs.values()) / MB:,.1f} MB reserved"),
        ("… most reserved", f"{probe.max_reserved / MB:,.0f} MB of {BUDGET / MB:,.0f} MB"),
        ("… PSS of the service", f"at most {max(probe.pss) / MB:,.0f} MB, median {_median(probe.pss) / MB:,.0f} MB"),
        ("… time until the answer", f"p50 {values['zipf_p50_ms']:,.1f} ms   p99 {values['zipf_p99_ms']:,.0f} ms"),
    ]
    return len(sent)


def _hot(setup: Setup, values: dict[str, Any], lines: list[tuple[str, str]]) -> int:
    rounds = 3 if setup.quick else hot.ROUNDS
    found = hot.measure(setup.engine, rounds)
    values.update(
        hot_alone_p99_us=found.alone_p99_us,
        hot_loading_p99_us=found.loading_p99_us,
        hot_ratio=found.loading_p99_us / found.alone_p99_us,
        hot_loads_per_s=found.loads_per_s,
    )
    lines += [
        ("hot model alone", f"p50 {found.alone_p50_us:,.0f} us   p99 {found.alone_p99_us:,.0f} us"),
        (
            "… beside loads and unloads",
            f"p50 {found.loading_p50_us:,.0f} us   p99 {found.loading_p99_us:,.0f} us, {found.loads_per_s:.1f} loads/s",
        ),
    ]
    return 2 * rounds * hot.REQUESTS


def _cold(setup: Setup, values: dict[str, Any], lines: list[tuple[str, str]]) -> int:
    large = cold.measure(MLP, setup.engine, (MLP_WIDTH,))
    small = cold.measure(CONV, setup.engine, CONV_SHAPE)
    values.update(
        cold_large_first_ratio=large.first_ratio,
        cold_large_again_ratio=large.again_ratio,
        cold_small_first_extra_ms=1e3 * (small.first_s - small.bare_s),
        cold_small_again_extra_ms=1e3 * (small.again_s - small.bare_s),
    )
    for size, found in ("192 MiB", large), ("10 MB", small):
        lines += [
            (f"bare build and run, {size}", f"{1e3 * found.bare_s:,.0f} ms"),
            ("… cold, never loaded", f"{1e3 * found.first_s:,.0f} ms   {found.first_ratio:.2f} x bare"),
            ("… cold, loaded before", f"{1e3 * found.again_s:,.0f} ms   {found.again_ratio:.2f} x bare"),
        ]
    return 2 * cold.REPEATS


def _registered(setup: Setup, values: dict[str, Any], lines: list[tuple[str, str]]) -> int:
    found = registered.measure(setup.engine)
    values.update(
        registered_daemon_extra_mb=found.daemon_extra_bytes / MB,
        registered_start_s=found.start_s,
        registered_cpu_percent=100 * found.cpu_share,
    )
    text = (
        f"{found.daemon_extra_bytes / MB:+,.1f} MB, start {found.start_s:.2f} s (one model: {found.start_one_s:.2f} s)"
    )
    lines.append((f"{registered.MANY:,} registered models", f"{text}, {100 * found.cpu_share:.2f} % CPU at rest"))
    return 1


def _tiny(setup: Setup, values: dict[str, Any], lines: list[tuple[str, str]]) -> int:
    found = registered.measure_tiny(setup.engine)
    values.update(tiny_before_mb=found.before / MB, tiny_after_mb=found.after / MB)
    text = f"{found.before / MB:,.0f} MB   {found.after / MB:,.0f} MB after each was loaded and unloaded"
    lines.append(("20 tiny models, none loaded", text))
    return 1


def _median(values: Sequence[int]) -> float:
    return statistics.median(values)


PARTS: Mapping[str, Callable[[Setup, dict[str, Any], list[tuple[str, str]]], int]] = {
    "zipf": _zipf,
    "hot": _hot,
    "cold": _cold,
    "registered": _registered,
    "tiny": _tiny,
}
"""The parts by name; each adds its figures and lines of the table, and returns its number of measurements."""
