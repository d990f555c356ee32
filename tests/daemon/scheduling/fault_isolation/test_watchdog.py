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


def test_nothing_is_due_where_nobody_is_watched_or_no_more() -> None:
    nobody, forgotten = Watchdog(PERIOD_S, 5.0, 50.0), watched()
    forgotten.remove("a")
    for watchdog in (nobody, forgotten):
        assert (watchdog.next_event_at, watchdog.take_due(1e9, idle)) == (FOREVER, NOTHING)
        assert watchdog.silence_s(["a"], 0.0) == FOREVER


def test_an_idle_worker_is_pinged_half_a_period_after_it_was_heard_of() -> None:
    watchdog = watched()
    assert (watchdog.next_event_at, watchdog.take_due(114.9, idle)) == (115.0, NOTHING)
    assert [watchdog.take_due(115.0, idle), watchdog.take_due(115.0, idle)] == [WatchdogActions(["a"], [], []), NOTHING]
    watchdog.on_pong("a", 116.0)
    assert [watchdog.take_due(130.9, idle), watchdog.take_due(131.0, idle)] == [NOTHING, WatchdogActions(["a"], [], [])]
    watchdog.on_pong("a", 131.0)
    watchdog.on_message("a", 140.0)  # it has answered a request
    assert [watchdog.take_due(154.9, idle), watchdog.take_due(155.0, idle)] == [NOTHING, WatchdogActions(["a"], [], [])]


def test_who_computes_is_not_pinged_and_is_looked_at_again() -> None:
    watchdog = watched()
    assert (watchdog.take_due(115.0, busy), watchdog.next_event_at) == (NOTHING, 122.5)
    assert watchdog.take_due(122.5, idle) == WatchdogActions(["a"], [], [])
    # That it was seen to compute is no answer.
    assert watchdog.silence_s(["a"], 130.5) == 30.5


def test_who_does_not_answer_a_ping_is_silent_once_and_not_pinged_again_because_another_is_due() -> None:
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


def test_the_canary_runs_as_often_as_it_should_busy_or_not() -> None:
    told: list[float] = []
    watchdog = watched(selftest_interval=8.0, due_by=told.append)
    assert watchdog.next_event_at == 108.0
    assert (watchdog.take_due(108.0, busy), watchdog.next_event_at) == (WatchdogActions([], ["a"], []), 158.0)
    watchdog.on_message("a", 110.0)  # what it had before
    watchdog.on_pong("a", 112.0)  # which may tell no digest: it is not asked for it without a pause
    assert told[-1] == watchdog.next_event_at == 120.0
    assert watchdog.take_due(120.0, busy) == WatchdogActions([], ["a"], [])
    assert [watchdog.take_due(169.9, idle), watchdog.take_due(170.0, idle)] == [NOTHING, WatchdogActions([], [], ["a"])]


def test_a_plain_ping_proves_nothing() -> None:
    watchdog = watched(selftest_interval=20.0)
    assert watchdog.take_due(115.0, idle) == WatchdogActions(["a"], [], [])
    watchdog.on_pong("a", 116.0)
    assert watchdog.take_due(120.0, idle) == WatchdogActions([], ["a"], [])


def test_one_that_was_heard_of_is_enough() -> None:
    watchdog = watched()
    watchdog.add("b", 120.0)
    assert watchdog.silence_s(["a", "b"], 150.0) is None
    assert watchdog.silence_s(["a", "b"], 150.1) is not None
    watchdog.on_message("a", 149.0)
    assert watchdog.silence_s(["a", "b"], 150.1) is None


class Watching(RuleBasedStateMachine):
    """Workers answer or not: whoever answers is never silent, whoever does not is found within the period."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.watchdog = Watchdog(PERIOD_S, 0.0, 50.0)
        self.pinged: dict[str, float] = {}
        self.hangs: dict[str, float] = {}
        self.there: set[str] = set()

    @rule(worker=st.sampled_from("abc"))
    def comes(self, worker: str) -> None:
        if worker not in self.there:
            self.there.add(worker)
            self.watchdog.add(worker, self.now)

    @rule(worker=st.sampled_from("abc"))
    def hangs_from_now_on(self, worker: str) -> None:
        if worker in self.there:
            self.hangs.setdefault(worker, self.now)

    @rule(worker=st.sampled_from("abc"))
    def answers_a_request(self, worker: str) -> None:
        if worker in self.there and worker not in self.hangs:
            self.watchdog.on_message(worker, self.now)

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.watchdog.next_event_at <= until:
            self.now = max(self.now, self.watchdog.next_event_at)
            self.happens()
        self.now = until

    def happens(self) -> None:
        due = self.watchdog.take_due(self.now, idle)
        assert not due.selftests
        for worker in due.unresponsive:
            assert worker in self.hangs
            self.there.discard(worker)
            del self.hangs[worker]
        for worker in due.pings:
            if worker not in self.hangs:
                self.watchdog.on_pong(worker, self.now)

    @invariant()
    def who_hangs_is_found_within_the_period(self) -> None:
        assert all(self.now - since <= PERIOD_S for since in self.hangs.values())

    @invariant()
    def who_answers_is_heard_of(self) -> None:
        for worker in self.there - set(self.hangs):
            assert self.watchdog.silence_s([worker], self.now) is None


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=examples(100), deadline=None)
