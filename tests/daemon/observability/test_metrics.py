from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.counters import ROWS_BOUNDS, SECONDS_BOUNDS, CounterRegistry, DaemonCounters
from weightd_daemon.models.model import ServedModel
from weightd_daemon.observability.metrics import MemoryFootprint, MetricsInputs, MetricsTime, build_metrics
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant, Viewer
from weightd_daemon.tenants.usage import Usage, UsageTable
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import ERRORS
from weightd_protocol.messages.metrics import Histogram, ModelMetrics, ProcessCount, ReloadCounts

from ..models.fakehost import SHA, W1, ModelHarness

ANN = Tenant("ann", TenantConfig(models=("digits",)))
BOB = Tenant("bob", TenantConfig())
NOW = MetricsTime("running", 2.0, 1000.0)
NONE = Histogram((), 0.0)


class World:
    """A model that serves and has answered one request, runs one and has three waiting; and one that still loads."""

    def __init__(self) -> None:
        self.meters, self.totals, self.accounts = CounterRegistry(), DaemonCounters(lambda: 3), UsageTable()
        shared = SharedScheduling(counters_of=self.meters.counters_of)
        self.stage, self.other = ModelHarness(workers=1, spares=1, shared=shared), ModelHarness()
        self.other.model.name = "secret"
        self.stage.serving()
        [first] = self.stage.some(1)
        self.stage.now += 0.25
        self.stage.answers(W1, first)
        self.stage.some(4)

    def tell(self, viewer: Viewer, *tenants: Tenant, moment: MetricsTime = NOW, **measured: Any) -> Any:
        models: list[ServedModel] = [self.stage.model, self.other.model]
        counted = MetricsInputs(models, self.meters, self.totals, tenants, self.accounts, 4, 5, **measured)
        return build_metrics("7", moment, viewer, counted)


def busy(accounts: UsageTable, tenant: str, model: str) -> Usage:
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.count_served(10)
    return account


def test_what_was_counted_and_how_things_stand() -> None:
    world = World()
    busy(world.accounts, "default", "digits")
    world.totals.reloads, world.totals.refused_reloads = 1, 2
    world.meters.counters_of("digits").unexpected_exits = 8
    footings = {"digits": MemoryFootprint(100, 50, 40, 10)}
    told = world.tell(Viewer(DEFAULT_TENANT, can_see_all=True), DEFAULT_TENANT, footprints=footings, pss_bytes=9)
    assert (told.id, told.state, told.uptime_s, told.pss_bytes) == ("7", "running", 2.0, 9)
    assert (told.seconds_bounds, told.rows_bounds) == (SECONDS_BOUNDS, ROWS_BOUNDS)
    assert (told.buffered_bytes, told.max_memory_bytes, told.dropped_responses, told.reloads) == (
        4,
        5,
        3,
        ReloadCounts(1, 2),
    )
    [everyone] = told.tenants
    assert (everyone.name, everyone.accounts[0].served) == ("default", 1)
    digits, secret = told.models
    assert (digits.name, digits.engine, digits.state, digits.ready) == ("digits", "onnxruntime", "serving", True)
    assert (digits.generation, digits.sha256) == (1, SHA)
    assert (digits.running, digits.queued) == (1, 3)
    assert digits.processes == (
        ProcessCount("holder", "holding", 1),
        ProcessCount("spare", "ready", 1),
        ProcessCount("worker", "ready", 1),
    )
    assert (digits.executions, digits.unexpected_exits) == (1, 8)
    bucket = SECONDS_BOUNDS.index(0.25)
    assert (digits.request_seconds.counts[bucket], digits.request_seconds.sum) == (1, 0.25)
    assert digits.compute_seconds == digits.request_seconds
    assert (digits.pss_bytes, digits.shared_bytes, digits.saved_bytes, digits.copy_bytes) == (100, 50, 40, 10)
    assert (secret.state, secret.ready, secret.pss_bytes, sum(secret.request_seconds.counts)) == (
        "snapshotting",
        False,
        None,
        0,
    )


def test_a_daemon_that_stops_is_not_ready() -> None:
    told = World().tell(
        Viewer(DEFAULT_TENANT, can_see_all=True), DEFAULT_TENANT, moment=MetricsTime("stopping", 2.0, 1000.0)
    )
    assert (told.state, told.models[0].ready) == ("stopping", False)


def test_who_may_not_see_others_is_told_of_its_models_and_of_itself() -> None:
    world = World()
    busy(world.accounts, "ann", "digits")
    busy(world.accounts, "bob", "digits")
    measured: dict[str, Any] = {"footprints": {"digits": MemoryFootprint(100, 50, 40, 10)}, "pss_bytes": 9}
    told = world.tell(Viewer(ANN, can_see_all=False), ANN, BOB, **measured)
    numbers = (0, 0, (), 0, 0, 0, 0, 0, 0)
    assert told.models == (
        ModelMetrics("digits", "onnxruntime", "serving", True, 0, "", *numbers, NONE, NONE, NONE, NONE),
    )
    assert [each.name for each in told.tenants] == ["ann"]
    assert (told.buffered_bytes, told.max_memory_bytes, told.dropped_responses, told.reloads) == (
        0,
        0,
        0,
        ReloadCounts(0, 0),
    )
    assert (told.pss_bytes, told.seconds_bounds, told.rows_bounds) == (None, (), ())
    for secret in ("bob", "secret", SHA):
        assert secret not in str(told)


def test_the_largest_answer_fits() -> None:
    model, accounts, meters = World().stage.model, UsageTable(), CounterRegistry()
    tenants = [Tenant(f"{number:064d}", TenantConfig()) for number in range(limits.MAX_TENANTS + 1)]
    names = [f"{number:064d}" for number in range(limits.MAX_MODELS)]
    refused: dict[str, int] = dict.fromkeys(ERRORS, 2**55)
    for name in names:
        meter = meters.counters_of(name)
        for buckets in (meter.requests, meter.queue, meter.compute, meter.rows):
            buckets.counts = [2**55] * len(buckets.counts)
        for tenant in tenants:
            busy(accounts, tenant.name, name).refused = {**refused}
    models: list[Any] = [SimpleNamespace(**{**vars(model), "name": name}) for name in names]
    for each in models:
        each.main_generation, each.state, each.generations, each.unready_reason = (
            model.main_generation,
            model.state,
            model.generations,
            model.unready_reason,
        )
    footings = dict.fromkeys(names, MemoryFootprint(2**55, 2**55, 2**55, 2**55))
    counted = MetricsInputs(models, meters, DaemonCounters(lambda: 0), tenants, accounts, 0, 0, footings)
    told = build_metrics("7", NOW, Viewer(DEFAULT_TENANT, can_see_all=True), counted)
    assert len(told.models) == limits.MAX_MODELS
    assert len(b"".join(encode(told, max_bytes=limits.MAX_STATUS_BYTES))) < limits.MAX_STATUS_BYTES / 2
