"""Tests of the self-test search: after a holder has crashed on an input, the next holder skips that input."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from weightd_daemon.generations.actions import Action, Role, Send, Spawn
from weightd_daemon.generations.progress import RetryHint, describe_selftest
from weightd_daemon.generations.selftest_search import MAX_HOLDER_DEATHS, SelfTestSearch
from weightd_daemon.generations.shared_weights import ABORT_TIMEOUT_S
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.generations.states import GenerationState
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol import limits
from weightd_protocol.messages.worker import AnnounceSelfTest, Build, ContinueSelfTest
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases

from .generation_harness import (
    BUILT,
    CARD,
    CPU,
    HOLDER,
    HOLDER2,
    HOLDER3,
    LOAD_TIMEOUT_S,
    W1,
    GenerationHarness,
    abort,
    pid,
)

SEGV, KILLED = ExitCause(-signal.SIGSEGV), ExitCause(-signal.SIGKILL)
UNKNOWN = SelfTestSpec()


def x(size: int) -> SelfTestCase:
    return {"x": (1, size)}


def holder(name: str) -> Action:
    return Spawn(name, Role.HOLDER)


class SearchHarness(GenerationHarness):
    """Generation with one worker, up to the build by its holder."""

    def __init__(
        self, selftest: SelfTestSpec = UNKNOWN, *, on_card: bool = False, known: SelfTestSpec | None = None
    ) -> None:
        super().__init__(1, CARD if on_card else CPU, selftest=selftest)
        self.snapshot_taken(known)
        self.hello(W1)

    def begin(self, holder: str = HOLDER) -> Build:
        """Connect the holder and return its Build order."""
        [order] = [each.order for each in self.hello(holder) if isinstance(each, Send)]
        assert isinstance(order, Build)
        return order

    def announce(self, *cases: SelfTestCase, holder: str = HOLDER, unfit: SelfTestCases = ()) -> None:
        self.generation.on_message(holder, AnnounceSelfTest(cases, unfit), self.now)
        assert self.take_actions() == ([Send(holder, ContinueSelfTest())] if cases else [])


@pytest.mark.parametrize("on_card", [False, True])
def test_crash_during_case_excludes_case_from_next_search(on_card: bool) -> None:
    search = SearchHarness(on_card=on_card)
    generation = search.generation
    assert search.begin() == Build((pid(W1),))
    search.announce(x(1))
    search.announce(x(2), unfit=(x(1),))
    assert search.exits(HOLDER, end=SEGV) == [holder(HOLDER2)]
    assert (generation.state, generation.processes.deaths, generation.failure.retry_hint) == (
        GenerationState.GATHERING,
        0,
        RetryHint.SAME_FAILURE,
    )
    assert search.begin(HOLDER2) == Build((pid(W1),), failed_cases=(x(1), x(2)))
    search.announce(x(32), holder=HOLDER2, unfit=(x(1), x(2)))
    search.built(replace(BUILT, selftest_cases=(x(32),)), HOLDER2)
    assert (generation.state, describe_selftest(generation.built)) == (GenerationState.ATTACHING, "x [1, 32]")
    spec = generation.selftest_search.spec
    assert spec == SelfTestSpec(cases=(x(32),), failed_cases=(x(1), x(2)), digest=BUILT.selftest_digest)
    assert SelfTestSearch(spec).build_message(()).selftest_digest == BUILT.selftest_digest


def test_waits_for_exit_of_failed_holder() -> None:
    search = SearchHarness(on_card=True)
    search.begin()
    search.announce(x(1))
    assert holder(HOLDER2) not in search.reports_failure(HOLDER, "it cannot run the self-test")
    assert search.exits(HOLDER) == [holder(HOLDER2)]
    assert search.begin(HOLDER2).failed_cases == (x(1),)


@pytest.mark.parametrize("announced", [[], [(x(1),), ()]])
def test_crash_outside_case_is_ordinary_failure(announced: list[SelfTestCases]) -> None:
    search = SearchHarness()
    search.begin()
    for cases in announced:
        search.announce(*cases)
    search.exits(HOLDER, end=SEGV)
    assert (search.state, search.generation.processes.deaths) == (GenerationState.FAILED, 1)
    assert search.generation.failure.retry_hint is RetryHint.MAY_SUCCEED


@pytest.mark.parametrize("selftest", [UNKNOWN, SelfTestSpec(should_search=False, cases=(x(7),))])
def test_case_is_retried_once_after_external_kill(selftest: SelfTestSpec) -> None:
    search = SearchHarness(selftest)
    order = search.begin()
    search.announce(x(7))
    assert search.exits(HOLDER, end=KILLED) == [holder(HOLDER2)]
    assert search.begin(HOLDER2) == order
    search.announce(x(7), holder=HOLDER2)
    replacement = search.exits(HOLDER2, end=ExitCause(-signal.SIGKILL, initiator=ExitInitiator.KERNEL))
    assert search.generation.processes.deaths == 2
    if selftest.should_search:
        assert replacement == [holder(HOLDER3)]
        assert search.begin(HOLDER3).failed_cases == (x(7),)
    else:
        # The deployment waits, and loads the model again.
        assert (search.state, search.generation.failure.retry_hint) == (GenerationState.FAILED, RetryHint.MAY_SUCCEED)


def test_search_ends_after_several_crashes() -> None:
    search = SearchHarness()
    *dying, last = [HOLDER, *(f"{HOLDER}{number}" for number in range(2, MAX_HOLDER_DEATHS + 2))]
    for size, name in enumerate(dying, 1):
        assert search.begin(name).search_selftest
        search.announce(x(size), holder=name, unfit=tuple(map(x, range(1, size))))
        search.exits(name, end=SEGV)
    order = search.begin(last)
    assert (order.search_selftest, order.selftest_cases, len(order.failed_cases)) == (False, (), MAX_HOLDER_DEATHS)
    search.built(replace(BUILT, selftest_digest="", selftest_cases=(), selftest_note="the search was given up"), last)
    assert (search.state, describe_selftest(search.generation.built)) == (
        GenerationState.ATTACHING,
        "none: the search was given up",
    )
    # The next generation does not search either.
    assert not search.generation.selftest_search.spec.should_search


def test_failed_cases_stay_within_protocol_limit() -> None:
    search = SearchHarness()
    search.begin()
    many = tuple(map(x, range(limits.MAX_SELFTEST_UNFIT_CASES)))
    search.announce(x(99), unfit=many)
    search.exits(HOLDER, end=SEGV)
    assert search.begin(HOLDER2) == Build((pid(W1),), search_selftest=False, failed_cases=many)


def test_search_timeout_ends_search() -> None:
    search = SearchHarness()
    search.begin()
    search.announce(x(1))
    assert abort(HOLDER) in search.after(LOAD_TIMEOUT_S)
    assert search.generation.processes.deaths == 0
    search.now += ABORT_TIMEOUT_S
    assert holder(HOLDER2) in search.exits(HOLDER, end=ExitCause(-signal.SIGABRT))
    order = search.begin(HOLDER2)
    assert (order.search_selftest, order.failed_cases) == (False, (x(1),))


@pytest.mark.parametrize("end", [SEGV, ExitCause(3)])
def test_crash_in_configured_selftest_is_final(end: ExitCause) -> None:
    search = SearchHarness(SelfTestSpec(should_search=False, cases=(x(7),)))
    order = search.begin()
    assert (order.search_selftest, order.selftest_cases) == (False, (x(7),))
    search.announce(x(7))
    search.exits(HOLDER, end=end)
    assert (search.state, search.generation.failure.retry_hint) == (GenerationState.FAILED, RetryHint.SAME_FAILURE)
    assert search.cause == f"{HOLDER}: {end}; the holder was running the configured self-test, x [1, 7]"


@pytest.mark.parametrize("end", [SEGV, ExitCause(3)])
def test_crash_in_later_case_does_not_blame_configured_one(end: ExitCause) -> None:
    search = SearchHarness(SelfTestSpec(should_search=False, cases=(x(7),)))
    search.begin()
    for cases in [(x(7),), (), (x(4),)]:
        search.announce(*cases)
    assert search.exits(HOLDER, end=end) == [holder(HOLDER2)]
    order = search.begin(HOLDER2)
    assert (order.search_selftest, order.selftest_cases, order.failed_cases) == (False, (x(7),), (x(4),))
    search.announce(x(7), holder=HOLDER2)
    search.exits(HOLDER2, end=end)
    assert search.state is GenerationState.FAILED


def test_search_starts_with_known_cases() -> None:
    known = SelfTestSpec(cases=(x(48), x(96)), failed_cases=(x(1),))
    search = SearchHarness(known=known)
    order = search.begin()
    assert (order.search_selftest, order.selftest_cases, order.failed_cases) == (True, known.cases, known.failed_cases)
    search.announce(*known.cases, unfit=known.failed_cases)
    search.exits(HOLDER, end=SEGV)
    assert search.begin(HOLDER2) == replace(order, selftest_cases=(), failed_cases=(x(1), x(48), x(96)))


def test_ignores_announcements_of_other_processes() -> None:
    search = SearchHarness()
    for name in (W1, HOLDER, "unknown"):
        search.generation.on_message(name, AnnounceSelfTest((x(1),), ()), search.now)
    assert search.take_actions() == []
