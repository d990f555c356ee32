from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.counters import CounterRegistry, DaemonCounterRecord, DaemonCounters, ModelCounterRecord
from weightd_daemon.handover import counter_store
from weightd_daemon.handover.counter_store import (
    INTERVAL_S,
    CounterEntry,
    CounterSource,
    CounterStore,
    CounterStoreError,
)
from weightd_daemon.tenants.reporting import tenant_statuses
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import OTHER_MODELS, UsageRecord, UsageTable
from weightd_protocol import limits
from weightd_protocol.errors import NotFound
from weightd_protocol.schema import plain

RECORDS = {"account": UsageRecord, "model": ModelCounterRecord, "daemon": DaemonCounterRecord}


def read(path: Path) -> list[UsageRecord]:
    """Return the usage records in this file."""
    return counter_store.read(path, RECORDS)["account"]


class CounterHarness:
    """Counters with a store, and the callbacks that the store has scheduled."""

    def __init__(self, path: Path, *, opened: bool = True) -> None:
        self.usage = UsageTable()
        self.model_counters = CounterRegistry()
        self.dropped = 0
        self.daemon_counters = DaemonCounters(lambda: self.dropped)
        self.scheduled: list[Callable[[], object]] = []
        sources: tuple[CounterSource, ...] = (self.usage, self.model_counters, self.daemon_counters)
        entries = {word: CounterEntry(book, RECORDS[word]) for word, book in zip(RECORDS, sources, strict=True)}
        self.store = CounterStore(path, entries, self.scheduled.append)
        if opened:
            self.store.open(0.0)

    @property
    def records(self) -> list[object]:
        """Return all records that the store would write."""
        return [*self.usage.records(), *self.model_counters.records(), *self.daemon_counters.records()]

    def run_scheduled(self) -> int:
        """Run all scheduled callbacks; return their number."""
        count = 0
        while self.scheduled:
            self.scheduled.pop(0)()
            count += 1
        return count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.counters"


def count_request(usage: UsageTable, tenant: str, model: str) -> None:
    account = usage.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.125)
    account.add_run(0.5, 4)
    account.count_served(10)
    account.count_refused(NotFound("no"))


def test_counters_survive_restart(path: Path) -> None:
    first = CounterHarness(path)
    count_request(first.usage, "ann", "m")
    first.usage.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    running = first.usage.usage_of("ann", "m")
    running.count_accepted(5)
    counters = first.model_counters.counters_of("m")
    for buckets in (counters.requests, counters.queue, counters.compute, counters.rows):
        buckets.add(0.25)
        buckets.add(1e6)
    counters.unexpected_exits, counters.restarts, counters.selftest_failures, counters.batch_mismatches = 1, 2, 3, 4
    first.daemon_counters.reloads, first.daemon_counters.refused_reloads, first.dropped = 5, 6, 7
    first.store.close()
    second = CounterHarness(path)
    assert second.records == first.records
    assert second.daemon_counters.dropped_responses == 7
    assert second.model_counters.counters_of("m").requests.counts == counters.requests.counts
    # The requests in flight ended with the first daemon.
    assert second.usage.usage_of("ann", "m").in_flight == 0
    count_request(second.usage, "ann", "m")
    second.store.close()
    assert CounterHarness(path).usage.usage_of("ann", "m").served == 2
    # Restored counters are not recent usage, so they do not affect fair shares.
    assert CounterHarness(path).usage.shares() == {}


def test_writes_periodically_in_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_store, "_MAX_RECORDS_PER_STEP", 10)
    daemon = CounterHarness(path)
    for number in range(25):
        count_request(daemon.usage, "ann", f"m{number}")
    assert daemon.store.timer.due_at == INTERVAL_S
    daemon.store.timer.fire(INTERVAL_S)
    assert not path.exists()
    # The counters of the daemon itself are part of the last step.
    assert daemon.run_scheduled() == 3
    assert len(read(path)) == 25
    assert daemon.store.timer.due_at == 2 * INTERVAL_S
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_close_writes_all_records_during_partial_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_store, "_MAX_RECORDS_PER_STEP", 10)
    daemon = CounterHarness(path)
    for number in range(25):
        count_request(daemon.usage, "ann", f"m{number}")
    daemon.store.timer.fire(INTERVAL_S)
    daemon.scheduled.pop(0)()
    daemon.store.close()
    assert len(read(path)) == 25


def test_unopened_store_writes_nothing(path: Path) -> None:
    unused = CounterHarness(path, opened=False).store
    unused.close()
    assert unused.timer.due_at == float("inf")
    assert not path.exists()


def test_unchanged_counters_are_not_written_again(path: Path) -> None:
    daemon = CounterHarness(path)
    count_request(daemon.usage, "ann", "m")
    daemon.store.close()
    path.unlink()
    daemon.store.close()
    assert not path.exists()
    count_request(daemon.usage, "ann", "m")
    daemon.store.close()
    assert read(path)[0].served == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{",
        b"[]",
        b"\xff",
        b'{"lines": 1}\n',
        b'{"account": {"tenant": "ann"}}\n{"lines": 1}\n',
        b'{"account": 1, "model": 1}\n{"lines": 1}\n',
        b'{"shoe": {}}\n{"lines": 1}\n',
        b'{"daemon": {"reloads": 1, "refused_reloads": 1, "dropped_responses": -1}}\n{"lines": 1}\n',
        b'{"daemon": {"reloads": 1, "refused_reloads": 1, "dropped_responses": NaN}}\n{"lines": 1}\n',
        2 * b'{"daemon": {"reloads": 1, "refused_reloads": 1, "dropped_responses": 1}}\n' + b'{"lines": 2}\n',
        b"[" * 100_000,
    ],
)
def test_invalid_file_restarts_counters_at_zero(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(content)
    daemon = CounterHarness(path)
    assert [*daemon.usage.records()] == []
    assert daemon.daemon_counters.reloads == 0
    [record] = caplog.records
    assert record.getMessage().startswith(f"all counters restart at zero: {path}: ")
    daemon.store.close()
    assert read(path) == []


def test_invalid_record_is_reported_with_field(path: Path) -> None:
    path.write_bytes(b'{"daemon": {"reloads": 1, "refused_reloads": 1, "dropped_responses": -1}}\n{"lines": 1}\n')
    with pytest.raises(CounterStoreError, match=r"^daemon\.dropped_responses: expected integer"):
        counter_store.read(path, {"daemon": DaemonCounterRecord})


def test_truncated_file_is_rejected(path: Path) -> None:
    daemon = CounterHarness(path)
    for name in ("m", "n"):
        count_request(daemon.usage, "ann", name)
    daemon.store.close()
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CounterStoreError):
            read(path)


def test_rejects_pipes_links_and_huge_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(path)
    with pytest.raises(CounterStoreError):
        read(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        read(path)
    path.unlink()
    monkeypatch.setattr(counter_store, "_MAX_BYTES", 100)
    path.write_bytes(bytes(101))
    with pytest.raises(CounterStoreError, match="expected a file of at most 100 bytes"):
        read(path)


def test_write_error_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = CounterHarness(path / "counters")
    path.touch()
    for _ in range(3):
        daemon.store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write the counters: {path}/counters: File exists"
    ]
    # The store creates a missing directory again.
    path.unlink()
    daemon.store.close()
    assert (path / "counters").is_file()


def test_largest_counters_can_be_written_and_reported(path: Path) -> None:
    """The largest valid counters of removed models are merged into one record, to which more requests are added."""
    max_restored = 2**55
    daemon = CounterHarness(path)
    for number in range(limits.MAX_MODELS):
        account = daemon.usage.usage_of("ann", f"{number}")
        account.requests, account.slot_seconds, account.refused = 2**62, 1e300, {"NOT_FOUND": 2**62}
    counters = daemon.model_counters.counters_of("m")
    counters.requests.counts, counters.requests.sum = [2 * max_restored] * len(counters.requests.counts), 1e300
    counters.unexpected_exits, daemon.daemon_counters.reloads = 2 * max_restored, 2 * max_restored
    daemon.store.close()
    for _ in range(2):
        daemon = CounterHarness(path)
        daemon.usage.keep_only(["ann"], [])
        count_request(daemon.usage, "ann", OTHER_MODELS)
        daemon.model_counters.counters_of("m").requests.add(1.0)
        [ann] = tenant_statuses([Tenant("ann", TenantConfig())], daemon.usage, {})
        assert plain(ann)
        assert plain(daemon.model_counters.counters_of("m").requests.to_histogram())
        daemon.store.close()
    assert daemon.daemon_counters.reloads == max_restored


COUNTS = st.integers(0, 2**55)


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=8), COUNTS, st.floats(0, 1e12)), max_size=5)
)
def test_read_returns_written_records(usage: list[tuple[str, str, int, float]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        daemon = CounterHarness(Path(directory, "a"))
        for tenant, model, count, seconds in usage:
            account = daemon.usage.usage_of(tenant, model)
            account.requests, account.slot_seconds = count, seconds
        daemon.store.close()
        assert [*CounterHarness(Path(directory, "a")).usage.records()] == [*daemon.usage.records()]
