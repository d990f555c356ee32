from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from testkit.examples import examples
from weightd_daemon.scheduling.fault_isolation.watchdog import Watchdog, WatchdogActions

PERIOD_S, FOREVER = 30.0, float("inf")
NOTHING = WatchdogActions([], [], [])


def idle(_: str) -> bool:
    return False


def busy(_: str) -> bool:
    return True


def watched(selftest_interval: float = 0.0, due_by: Callable[[float], object] = float) -> Watchdog:
    watchdog = Watchdog(PERIOD_S, selftest_interval, 50.0, due_by)
    watchdog.add("a", 100.0)
    return watchdog


def test_empty_watchdog_has_nothing_due() -> None:
    empty, emptied = Watchdog(PERIOD_S, 5.0, 50.0), watched()
    emptied.remove("a")
    for watchdog in (empty, emptied):
        assert (watchdog.next_event_at, watchdog.take_due(1e9, idle)) == (FOREVER, NOTHING)
        assert watchdog.silence_s(["a"], 0.0) == FOREVER


def test_pings_idle_worker_after_half_a_period() -> None:
    watchdog = watched()
    assert (watchdog.next_event_at, watchdog.take_due(114.9, idle)) == (115.0, NOTHING)
    assert [watchdog.take_due(115.0, idle), watchdog.take_due(115.0, idle)] == [WatchdogActions(["a"], [], []), NOTHING]
    watchdog.on_pong("a", 116.0)
    assert [watchdog.take_due(130.9, idle), watchdog.take_due(131.0, idle)] == [NOTHING, WatchdogActions(["a"], [], [])]
    watchdog.on_pong("a", 131.0)
    watchdog.on_message("a", 140.0)  # the worker has answered a request
    assert [watchdog.take_due(154.9, idle), watchdog.take_due(155.0, idle)] == [NOTHING, WatchdogActions(["a"], [], [])]


def test_busy_worker_is_checked_again_later() -> None:
    watchdog = watched()
    assert (watchdog.take_due(115.0, busy), watchdog.next_event_at) == (NOTHING, 122.5)
    assert watchdog.take_due(122.5, idle) == WatchdogActions(["a"], [], [])
    # Being busy does not count as a message.
    assert watchdog.silence_s(["a"], 130.5) == 30.5


def test_reports_unresponsive_worker_once() -> None:
    watchdog = watched()
    watchdog.add("b", 105.0)
    assert [watchdog.take_due(115.0, idle), watchdog.take_due(120.0, idle)] == [
        WatchdogActions(["a"], [], []),
        WatchdogActions(["b"], [], []),
    ]
    watchdog.on_pong("b", 121.0)
    assert (watchdog.next_event_at, watchdog.take_due(130.0, busy)) == (130.0, WatchdogActions([], [], ["a"]))
    watchdog.remove("b")
    assert (watchdog.take_due(1e9, idle), watchdog.next_event_at) == (NOTHING, FOREVER)


def test_selftests_run_on_schedule() -> None:
    scheduled: list[float] = []
    watchdog = watched(selftest_interval=8.0, due_by=scheduled.append)
    assert watchdog.next_event_at == 108.0
    assert (watchdog.take_due(108.0, busy), watchdog.next_event_at) == (WatchdogActions([], ["a"], []), 158.0)
    watchdog.on_message("a", 110.0)  # results of earlier batches
    watchdog.on_pong("a", 112.0)  # perhaps without a digest: the next self-test comes after a pause
    assert scheduled[-1] == watchdog.next_event_at == 120.0
    assert watchdog.take_due(120.0, busy) == WatchdogActions([], ["a"], [])
    assert [watchdog.take_due(169.9, idle), watchdog.take_due(170.0, idle)] == [NOTHING, WatchdogActions([], [], ["a"])]


def test_plain_ping_does_not_replace_a_selftest() -> None:
    watchdog = watched(selftest_interval=20.0)
    assert watchdog.take_due(115.0, idle) == WatchdogActions(["a"], [], [])
    watchdog.on_pong("a", 116.0)
    assert watchdog.take_due(120.0, idle) == WatchdogActions([], ["a"], [])


def test_group_is_alive_if_one_process_is() -> None:
    watchdog = watched()
    watchdog.add("b", 120.0)
    assert watchdog.silence_s(["a", "b"], 150.0) is None
    assert watchdog.silence_s(["a", "b"], 150.1) is not None
    watchdog.on_message("a", 149.0)
    assert watchdog.silence_s(["a", "b"], 150.1) is None


class WatchdogMachine(RuleBasedStateMachine):
    """Workers that answer are never reported; workers that hang are reported within the period."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.watchdog = Watchdog(PERIOD_S, 0.0, 50.0)
        self.pinged: dict[str, float] = {}
        self.hung_since: dict[str, float] = {}
        self.workers: set[str] = set()

    @rule(worker=st.sampled_from("abc"))
    def add(self, worker: str) -> None:
        if worker not in self.workers:
            self.workers.add(worker)
            self.watchdog.add(worker, self.now)

    @rule(worker=st.sampled_from("abc"))
    def start_hanging(self, worker: str) -> None:
        if worker in self.workers:
            self.hung_since.setdefault(worker, self.now)

    @rule(worker=st.sampled_from("abc"))
    def answer_a_request(self, worker: str) -> None:
        if worker in self.workers and worker not in self.hung_since:
            self.watchdog.on_message(worker, self.now)

    @rule(seconds=st.floats(0.0, 40.0))
    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.watchdog.next_event_at <= until:
            self.now = max(self.now, self.watchdog.next_event_at)
            self.run_due()
        self.now = until

    def run_due(self) -> None:
        due = self.watchdog.take_due(self.now, idle)
        assert not due.selftests
        for worker in due.unresponsive:
            assert worker in self.hung_since
            self.workers.discard(worker)
            del self.hung_since[worker]
        for worker in due.pings:
            if worker not in self.hung_since:
                self.watchdog.on_pong(worker, self.now)

    @invariant()
    def hung_workers_are_reported_within_the_period(self) -> None:
        assert all(self.now - since <= PERIOD_S for since in self.hung_since.values())

    @invariant()
    def answering_workers_are_not_silent(self) -> None:
        for worker in self.workers - set(self.hung_since):
            assert self.watchdog.silence_s([worker], self.now) is None


TestWatchdogMachine = WatchdogMachine.TestCase
TestWatchdogMachine.settings = settings(max_examples=examples(100), deadline=None)
