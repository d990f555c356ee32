"""Status and metrics responses: complete for operators, restricted to one tenant for its users."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from testkit.model_factory import model_factory
from testkit.no_channels import no_channels
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.counters import ROWS_BOUNDS, SECONDS_BOUNDS, CounterRegistry, DaemonCounters
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.lifecycle import LifecycleLimits, ModelLifecycle
from weightd_daemon.models.load_progress import LoadProgress
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.observability.memory import Measurable, Memory, MemoryFootprint, MemoryReport, MemoryScan
from weightd_daemon.observability.model_metrics import queued_counts
from weightd_daemon.observability.snapshot import Books, SnapshotBuilder, SnapshotSources
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.memory import MIB, ProcessMemory
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.tenants.reporting import tenant_statuses
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant, TenantResolver, Viewer
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, Usage, UsageTable
from weightd_daemon.transport.zmq_proxies import ProxyInfo
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import ERRORS, NotFound
from weightd_protocol.messages.accounts import AccountStatus
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.metrics import Histogram, ModelMetrics, ProcessCount, ReloadCounts
from weightd_protocol.messages.status import ModelStatus, ProxyStatus, StatusResponse
from weightd_protocol.messages.worker import (
    Attached,
    Built,
    Hello,
)
from weightd_protocol.messages.worker_common import SharingTraits
from weightd_protocol.version import VERSION

from ..models.fakehost import SHA, W1, ModelHarness

ANN = Tenant("ann", TenantConfig(weight=3.0, models=("m", "b*", "digits")))
BOB = Tenant("bob", TenantConfig())
EVERYTHING = Viewer(DEFAULT_TENANT, can_see_all=True)
NONE = Histogram((), 0.0)
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
X = TensorSignature("x", "FP32", (4,))
WEIGHTS = 100 * MIB


@pytest.fixture(autouse=True)
def _fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "now", lambda: 1000.0)


class SnapshotHarness:
    """A SnapshotBuilder over fake sources. `devices`, `processes` and `proxies` stand for the parts of a daemon."""

    def __init__(
        self,
        *models: Any,
        devices: Sequence[DeviceBudget] = (),
        processes: Any = (),
        proxies: Any = (),
        counters: CounterRegistry | None = None,
    ) -> None:
        self.books = Books(UsageTable(), counters or CounterRegistry(), DaemonCounters(lambda: 3))
        self.tenants = TenantResolver({})
        self.shutdown = Shutdown()
        self.memory_report = MemoryReport()
        by_name = {each.name: each for each in models}
        parts: Any = SimpleNamespace(
            registry=SimpleNamespace(models=by_name, all_models=lambda: models),
            supervisor=SimpleNamespace(
                processes=dict(processes),
                storage=SimpleNamespace(files={}),
                fork_servers=SimpleNamespace(servers={}),
            ),
            load_monitor=SimpleNamespace(progress=lambda *_: LoadProgress(), update=lambda *_: None),
            memory_budget=SimpleNamespace(used_bytes=4, max_bytes=5),
            proxies=SimpleNamespace(proxies=proxies, pids=[]),
        )
        lifecycle = ModelLifecycle(LifecycleLimits(), by_name.get, {})
        sources = SnapshotSources(
            parts.registry, lambda viewer: (), parts.supervisor, {each.name: each for each in devices},
            parts.load_monitor, self.books, self.tenants, parts.memory_budget, parts.proxies,
            self.shutdown, lifecycle, lambda: "a note", no_channels(),
        )  # fmt: skip
        sampler: Any = SimpleNamespace(poll=lambda *_: self.memory_report)
        self.builder = SnapshotBuilder(sources, sampler)

    def metrics(self, viewer: Viewer = EVERYTHING) -> Any:
        return self.builder.metrics("7", viewer)


class TwoModels:
    """Two models: `stage` serves, has answered one request, runs one and queues three; `other` is still loading."""

    def __init__(self) -> None:
        counters = CounterRegistry()
        shared = SharedScheduling(counters_of=counters.counters_of)
        self.stage, self.other = ModelHarness(workers=1, spares=1, shared=shared), ModelHarness()
        self.other.model.name = "secret"
        self.parts = SnapshotHarness(self.stage.model, self.other.model, counters=counters)
        self.accounts = self.parts.books.usage_table
        self.stage.serving()
        [first] = self.stage.submit_new(1)
        self.stage.now += 0.25
        self.stage.answers(W1, first)
        self.stage.submit_new(4)


def add_usage(accounts: UsageTable, tenant: str, model: str, requests: int = 1) -> Usage:
    account = accounts.usage_of(tenant, model)
    for _ in range(requests):
        account.count_accepted(100)
        account.add_run(0.5, 2)
        account.count_served(10)
    return account


def test_reports_counters_and_model_states() -> None:
    harness = TwoModels()
    add_usage(harness.accounts, "default", "digits")
    books = harness.parts.books
    books.daemon_counters.reloads, books.daemon_counters.refused_reloads = 1, 2
    books.counters.counters_of("digits").unexpected_exits = 8
    harness.parts.memory_report = MemoryReport(9, {"digits": MemoryFootprint(100, 50, 40, 10)})
    reply = harness.parts.metrics()
    assert (reply.id, reply.state, reply.pss_bytes) == ("7", "running", 9)
    assert (reply.seconds_bounds, reply.rows_bounds) == (SECONDS_BOUNDS, ROWS_BOUNDS)
    assert (reply.buffered_bytes, reply.max_memory_bytes, reply.dropped_responses, reply.reloads) == (
        4,
        5,
        3,
        ReloadCounts(1, 2),
    )
    [everyone] = reply.tenants
    assert (everyone.name, everyone.accounts[0].served) == ("default", 1)
    digits, secret = reply.models
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


def test_reports_not_ready_while_stopping() -> None:
    harness = TwoModels()
    harness.parts.shutdown.handle(ShutdownEvent.STOP)
    reply = harness.parts.metrics()
    assert (reply.state, reply.models[0].ready) == ("stopping", False)


def test_restricts_metrics_to_the_tenant() -> None:
    harness = TwoModels()
    add_usage(harness.accounts, "ann", "digits")
    add_usage(harness.accounts, "bob", "digits")
    harness.parts.memory_report = MemoryReport(9, {"digits": MemoryFootprint(100, 50, 40, 10)})
    reply = harness.parts.metrics(Viewer(ANN, can_see_all=False))
    numbers = (0, 0, (), 0, 0, 0, 0, 0, 0)
    assert reply.models == (
        ModelMetrics("digits", "onnxruntime", "serving", True, 0, "", *numbers, NONE, NONE, NONE, NONE),
    )
    assert [each.name for each in reply.tenants] == ["ann"]
    assert (reply.buffered_bytes, reply.max_memory_bytes, reply.dropped_responses, reply.reloads) == (
        0,
        0,
        0,
        ReloadCounts(0, 0),
    )
    assert (reply.pss_bytes, reply.seconds_bounds, reply.rows_bounds) == (None, (), ())
    for secret in ("bob", "secret", SHA):
        assert secret not in str(reply)


def test_largest_metrics_response_fits() -> None:
    model = TwoModels().stage.model
    tenants = {f"{number:064d}": TenantConfig() for number in range(limits.MAX_TENANTS)}
    names = [f"{number:064d}" for number in range(limits.MAX_MODELS)]
    models: list[Any] = [SimpleNamespace(**{**vars(model), "name": name}) for name in names]
    for each in models:
        each.last_generation, each.state_name, each.generations, each.unready_reason = (
            model.readiness.main_generation,
            model.readiness.state_name,
            model.generations,
            model.readiness.unready_reason,
        )
    parts = SnapshotHarness(*models)
    parts.tenants.configure(tenants)
    refused: dict[str, int] = dict.fromkeys(ERRORS, 2**55)
    for name in names:
        model_counters = parts.books.counters.counters_of(name)
        for buckets in (model_counters.requests, model_counters.queue, model_counters.compute, model_counters.rows):
            buckets.counts = [2**55] * len(buckets.counts)
        for tenant in tenants:
            add_usage(parts.books.usage_table, tenant, name).refused = {**refused}
    parts.memory_report = MemoryReport(2**55, dict.fromkeys(names, MemoryFootprint(2**55, 2**55, 2**55, 2**55)))
    reply = parts.metrics()
    assert len(reply.models) == limits.MAX_MODELS
    assert len(b"".join(encode(reply, max_bytes=limits.MAX_STATUS_BYTES))) < limits.MAX_STATUS_BYTES / 2


def test_reports_memory_of_a_model_on_a_card() -> None:
    holder, worker, spare = "m.1.holder", "m.1.w1", "m.1.w2"
    config = ModelConfig("/m.mindir", "mindspore_lite", "python3", spares=1, devices=("ascend:0",))
    card = DeviceBudget("ascend:0", 2**36)
    model = model_factory({"ascend:0": card}, mock.MagicMock(), mock.MagicMock()).make("m", config, IdSequence())
    model.start(0.0)
    model.on_snapshot_taken(ModelSource("/m.mindir"), Snapshot("/m.mindir", "", SHA, WEIGHTS), 0.0)
    for name in (holder, worker, spare):
        model.deployments.process_events.on_message(name, Hello(name, SHA, {"weightd": VERSION}, CARD), (), 0.0)
    model.deployments.process_events.on_message(
        holder, Built("7", (X,), (X,), ({"x": (4,)},), "digest", WEIGHTS), (), 0.0
    )
    for name in (worker, spare):
        model.deployments.process_events.on_message(name, Attached("digest", WEIGHTS), (), 0.0)
    processes: dict[str, Any] = {name: SimpleNamespace(pid=pid) for pid, name in enumerate((holder, worker, spare), 10)}
    found: dict[Measurable, Memory] = {
        2: None,
        10: ProcessMemory(1000, 900, 950),
        11: ProcessMemory(100, 90, 95),
    }
    scan = MemoryScan("s", (), lambda _: found)
    assert scan.is_complete()
    parts = SnapshotHarness(
        model,
        devices=[card, DeviceBudget("cpu"), DeviceBudget("cpu:0")],
        processes=processes,
        proxies=[ProxyInfo("lan", "tcp://*:1", 2, 3, 4)],
    )
    found[os.getpid()] = ProcessMemory(7, 6, 5)
    reply = parts.builder.status(scan)
    assert (reply.pss_bytes, reply.dropped_responses, reply.buffered_bytes, reply.max_memory_bytes, reply.note) == (
        7,
        3,
        4,
        5,
        "a note",
    )
    assert reply.zmq_proxies == (ProxyStatus("lan", "tcp://*:1", 2, 3, 4, None),)
    [generation] = reply.models[0].generations
    assert [
        (each.name, each.role, each.pss_bytes, each.private_bytes, each.anonymous_bytes)
        for each in generation.processes
    ] == [
        (holder, "holder", 1000, 900, 950),
        (worker, "worker", 100, 90, 95),
        (spare, "spare", None, None, None),
    ]
    assert {each.device for each in generation.processes} == {"ascend:0"}
    assert (generation.copy_bytes, generation.saved_bytes) == (WEIGHTS, WEIGHTS)
    [device] = reply.devices
    assert (device.name, device.processes, device.weights_bytes) == ("ascend:0", 3, card_bytes(WEIGHTS))
    assert (device.saved_bytes, device.capacity_bytes, device.free_bytes) == (card_bytes(WEIGHTS), 2**36, None)


def model(name: str, *queued: Tenant) -> Any:
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(engine="onnxruntime"),
        readiness=SimpleNamespace(state_name="serving"),
        dispatcher=SimpleNamespace(queued_by_tenant=Counter(queued)),
    )


def test_reports_usage_per_tenant_and_model() -> None:
    accounts = UsageTable()
    accounts.sample()
    add_usage(accounts, "ann", "m", 3).count_accepted(7)
    accounts.usage_of("ann", "m").add_queue_time(0.25)
    accounts.usage_of("ann", "m").count_refused(QuotaExceeded("max_rate", "too many"))
    accounts.usage_of("ann", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    accounts.usage_of("ann", "never")
    queued = queued_counts([model("m", ANN, BOB, ANN), model("n")])
    ann, bob = tenant_statuses([ANN, BOB], accounts, queued)
    assert (ann.name, ann.weight, ann.share, ann.merged_accounts) == ("ann", 3.0, 1.0, 0)
    assert ann.accounts == (
        AccountStatus("m", 4, 3, 6, 1.5, 0.25, 307, 30, 1, 2, {"max_rate": 1}),
        AccountStatus("", 1, 0, 0, 0.0, 0.0, 0, 0, 0, 0, {"NOT_FOUND": 1}),
    )
    assert (bob.weight, bob.accounts, bob.share) == (1.0, (), None)


def test_reports_no_share_before_anything_has_run() -> None:
    [ann] = tenant_statuses([ANN], UsageTable(), {})
    assert ann.share is None


def test_merges_accounts_over_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", 4)
    accounts = UsageTable()
    for requests, name in enumerate(("a", "b", "c", "d"), 1):
        add_usage(accounts, "ann", name, requests).count_accepted(1)
    add_usage(accounts, "bob", "a", 9)
    accounts.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    ann, bob = tenant_statuses([ANN, BOB], accounts, {("ann", "a"): 1, ("ann", "c"): 1, ("ann", "d"): 1})
    assert [(each.model, each.requests, each.in_flight, each.queued) for each in ann.accounts] == [
        ("d", 5, 1, 1),
        ("", 9, 3, 2),
    ]
    assert (ann.merged_accounts, bob.merged_accounts) == (3, 0)
    assert [(each.model, each.requests) for each in bob.accounts] == [("a", 9), ("", 1)]


def test_largest_accounts_fit() -> None:
    accounts = UsageTable()
    tenants = [Tenant(f"{number:064d}", TenantConfig()) for number in range(limits.MAX_TENANTS + 1)]
    for tenant in tenants:
        for number in range(limits.MAX_MODELS):
            account = accounts.usage_of(tenant.name, f"{number:064d}")
            for field in ("requests", "served", "rows", "bytes_in", "bytes_out", "unexpected_exits", "in_flight"):
                setattr(account, field, 2**50)
            account.refused = {f"{reason:020d}": 2**54 for reason in range(limits.MAX_REFUSAL_REASONS // 2)}
    whole = tenant_statuses(tenants, accounts, {})
    assert limits.MAX_ACCOUNTS - 256 < sum(len(each.accounts) for each in whole) <= limits.MAX_ACCOUNTS
    response = StatusResponse("id", "1", "running", 1, 1.0, 1, (), tenants=whole)
    assert len(b"".join(encode(response, max_bytes=limits.MAX_STATUS_BYTES))) < limits.MAX_STATUS_BYTES / 2


def test_restricts_status_to_the_tenant() -> None:
    parts = SnapshotHarness(model("m", BOB, ANN, BOB), model("secret", BOB), model("big"))
    accounts = parts.books.usage_table
    add_usage(accounts, "ann", "m", 2).count_refused(NotFound("no"))
    add_usage(accounts, "bob", "m", 100)
    response = parts.builder.tenant_status("7", ANN)
    assert response.models == (
        ModelStatus("m", "onnxruntime", "", "serving", 1, 2, 1, ()),
        ModelStatus("big", "onnxruntime", "", "serving", 0, 0, 0, ()),
    )
    assert [each.name for each in response.tenants] == ["ann"]
    assert (response.id, response.state) == ("7", "running")
    assert (response.pid, response.pss_bytes, response.buffered_bytes, response.max_memory_bytes) == (0, 0, 0, 0)
    assert (response.zmq_proxies, response.fork_servers, response.devices, response.memory) == ((), (), (), None)
    # Usage of a model that the tenant may no longer see is reported without the model's name.
    add_usage(accounts, "ann", "secret", 3)
    response = parts.builder.tenant_status("7", ANN)
    [ann] = response.tenants
    assert [(each.model, each.served) for each in ann.accounts] == [("m", 2), ("", 3)]
    assert ann.merged_accounts == 0
    for secret in ("bob", "secret"):
        assert secret not in str(response)
