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
    """The accounts that are written there."""
    return counter_store.read(path, RECORDS)["account"]


class Daemon:
    """What counts, on a file; and what it has to do soon."""

    def __init__(self, path: Path, *, opened: bool = True) -> None:
        self.accounts = UsageTable()
        self.meters = CounterRegistry()
        self.dropped = 0
        self.totals = DaemonCounters(lambda: self.dropped)
        self.soon: list[Callable[[], object]] = []
        books: tuple[CounterSource, ...] = (self.accounts, self.meters, self.totals)
        entries = {word: CounterEntry(book, RECORDS[word]) for word, book in zip(RECORDS, books, strict=True)}
        self.ledger = CounterStore(path, entries, self.soon.append)
        if opened:
            self.ledger.open(0.0)

    @property
    def counted(self) -> list[object]:
        """All that would be written."""
        return [*self.accounts.records(), *self.meters.records(), *self.totals.records()]

    def turns(self) -> int:
        """Do it; return how many turns that took."""
        count = 0
        while self.soon:
            self.soon.pop(0)()
            count += 1
        return count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "w.counters"


def ask(accounts: UsageTable, tenant: str, model: str) -> None:
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.125)
    account.add_run(0.5, 4)
    account.count_served(10)
    account.count_refused(NotFound("no"))


def test_the_next_daemon_goes_on_with_what_was_counted(path: Path) -> None:
    first = Daemon(path)
    ask(first.accounts, "ann", "m")
    first.accounts.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    running = first.accounts.usage_of("ann", "m")
    running.count_accepted(5)
    meter = first.meters.counters_of("m")
    for buckets in (meter.requests, meter.queue, meter.compute, meter.rows):
        buckets.add(0.25)
        buckets.add(1e6)
    meter.unexpected_exits, meter.restarts, meter.selftest_failures, meter.batch_mismatches = 1, 2, 3, 4
    first.totals.reloads, first.totals.refused_reloads, first.dropped = 5, 6, 7
    first.ledger.close()
    second = Daemon(path)
    assert second.counted == first.counted
    assert second.totals.dropped_responses == 7
    assert second.meters.counters_of("m").requests.counts == meter.requests.counts
    # What was under way has ended with the daemon.
    assert second.accounts.usage_of("ann", "m").in_flight == 0
    ask(second.accounts, "ann", "m")
    second.ledger.close()
    assert Daemon(path).accounts.usage_of("ann", "m").served == 2
    # What was before is no share of late.
    assert Daemon(path).accounts.shares() == {}


def test_it_is_written_now_and_then_and_others_have_their_turns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_store, "_MAX_RECORDS_PER_STEP", 10)
    daemon = Daemon(path)
    for number in range(25):
        ask(daemon.accounts, "ann", f"m{number}")
    assert daemon.ledger.timer.due_at == INTERVAL_S
    daemon.ledger.timer.fire(INTERVAL_S)
    assert not path.exists()
    # And the daemon itself.
    assert daemon.turns() == 3
    assert len(read(path)) == 25
    assert daemon.ledger.timer.due_at == 2 * INTERVAL_S
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_what_is_written_at_the_end_is_whole_whatever_was_begun(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_store, "_MAX_RECORDS_PER_STEP", 10)
    daemon = Daemon(path)
    for number in range(25):
        ask(daemon.accounts, "ann", f"m{number}")
    daemon.ledger.timer.fire(INTERVAL_S)
    daemon.soon.pop(0)()
    daemon.ledger.close()
    assert len(read(path)) == 25


def test_what_was_not_opened_writes_nothing(path: Path) -> None:
    unused = Daemon(path, opened=False).ledger
    unused.close()
    assert unused.timer.due_at == float("inf")
    assert not path.exists()


def test_what_is_there_already_is_not_written_again(path: Path) -> None:
    daemon = Daemon(path)
    ask(daemon.accounts, "ann", "m")
    daemon.ledger.close()
    path.unlink()
    daemon.ledger.close()
    assert not path.exists()
    ask(daemon.accounts, "ann", "m")
    daemon.ledger.close()
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
def test_what_is_no_such_file_is_as_good_as_none(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(content)
    daemon = Daemon(path)
    assert [*daemon.accounts.records()] == []
    assert daemon.totals.reloads == 0
    [record] = caplog.records
    assert record.getMessage().startswith(f"all counters restart at zero: {path}: ")
    daemon.ledger.close()
    assert read(path) == []


def test_what_is_wrong_is_told_with_its_place(path: Path) -> None:
    path.write_bytes(b'{"daemon": {"reloads": 1, "refused_reloads": 1, "dropped_responses": -1}}\n{"lines": 1}\n')
    with pytest.raises(CounterStoreError, match=r"^daemon\.dropped_responses: expected integer"):
        counter_store.read(path, {"daemon": DaemonCounterRecord})


def test_half_a_file_is_none(path: Path) -> None:
    daemon = Daemon(path)
    for name in ("m", "n"):
        ask(daemon.accounts, "ann", name)
    daemon.ledger.close()
    whole = path.read_bytes()
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CounterStoreError):
            read(path)


def test_neither_a_pipe_nor_a_link_nor_something_huge_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_cannot_be_written_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(path / "counters")
    path.touch()
    for _ in range(3):
        daemon.ledger.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write the counters: {path}/counters: File exists"
    ]
    # A directory that has vanished is made anew.
    path.unlink()
    daemon.ledger.close()
    assert (path / "counters").is_file()


def test_however_much_is_in_the_file_it_is_written_again_and_can_be_told(path: Path) -> None:
    """The largest numbers of a file, of models that are gone, come together in one account, and others on top."""
    most = 2**55
    daemon = Daemon(path)
    for number in range(limits.MAX_MODELS):
        account = daemon.accounts.usage_of("ann", f"{number}")
        account.requests, account.slot_seconds, account.refused = 2**62, 1e300, {"NOT_FOUND": 2**62}
    meter = daemon.meters.counters_of("m")
    meter.requests.counts, meter.requests.sum = [2 * most] * len(meter.requests.counts), 1e300
    meter.unexpected_exits, daemon.totals.reloads = 2 * most, 2 * most
    daemon.ledger.close()
    for _ in range(2):
        daemon = Daemon(path)
        daemon.accounts.keep_only(["ann"], [])
        ask(daemon.accounts, "ann", OTHER_MODELS)
        daemon.meters.counters_of("m").requests.add(1.0)
        [ann] = tenant_statuses([Tenant("ann", TenantConfig())], daemon.accounts, {})
        assert plain(ann)
        assert plain(daemon.meters.counters_of("m").requests.to_histogram())
        daemon.ledger.close()
    assert daemon.totals.reloads == most


COUNTS = st.integers(0, 2**55)


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=8), COUNTS, st.floats(0, 1e12)), max_size=5)
)
def test_whatever_was_counted_comes_back(accounts: list[tuple[str, str, int, float]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        daemon = Daemon(Path(directory, "a"))
        for tenant, model, count, seconds in accounts:
            account = daemon.accounts.usage_of(tenant, model)
            account.requests, account.slot_seconds = count, seconds
        daemon.ledger.close()
        assert [*Daemon(Path(directory, "a")).accounts.records()] == [*daemon.accounts.records()]
