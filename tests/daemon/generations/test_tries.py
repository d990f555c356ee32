"""A holder that dies in its search for a canary: the next one leaves out what it died of."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from weightd.daemon.generations.actions import Action, Kill, Role, Send, Spawn
from weightd.daemon.generations.generation import ABORT_TIMEOUT_S, Generation
from weightd.daemon.generations.plan import Canary, Terms
from weightd.daemon.generations.progress import Outlook
from weightd.daemon.generations.states import GenerationState
from weightd.daemon.generations.tries import MAX_DEATHS
from weightd.daemon.host.ends import By, End
from weightd.protocol import limits
from weightd.protocol.messages.children import Broken, Build, Built, Case, Cases, Hello, Probe, Probing, Traits
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.version import VERSION

SHA = "5" * 64
X = TensorSignature("x", "FP32", (-1, -1))
SEGV = End(-signal.SIGSEGV)


def x(size: int) -> Case:
    return {"x": (1, size)}


class Search:
    """A generation with one worker, up to where its holder builds."""

    def __init__(self, canary: Canary | None = None, *, fixed: bool = False, known: Canary | None = None) -> None:
        self.now = 1000.0
        self.traits = Traits(fixed, holder_must_outlive=fixed, attach_rewrites_weights=fixed)
        self.generation = Generation("m.1", Terms(1, 600.0, canary=canary or Canary()))
        self.generation.start()
        self.generation.pinned(SHA, self.now, known)
        self.generation.take_actions()
        self.greet("m.1.w1")

    def greet(self, name: str) -> list[Action]:
        self.generation.hello(name, Hello(f"pid of {name}", SHA, {"weightd": VERSION}, self.traits), self.now)
        return self.generation.take_actions()

    def begin(self, holder: str = "m.1.holder") -> Build:
        """Let the holder say HELLO; return what it is told."""
        [order] = [each.order for each in self.greet(holder) if isinstance(each, Send)]
        assert isinstance(order, Build)
        return order

    def try_(self, *cases: Case, holder: str = "m.1.holder", unfit: Cases = ()) -> None:
        self.generation.probing(holder, Probing(cases, unfit))
        assert self.generation.take_actions() == ([Send(holder, Probe())] if cases else [])

    def die(self, holder: str = "m.1.holder", end: End = SEGV) -> list[Action]:
        self.generation.exited(holder, end, self.now)
        return self.generation.take_actions()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_death_in_a_try_is_followed_by_a_holder_that_leaves_it_out(fixed: bool) -> None:
    search = Search(fixed=fixed)
    pids = ("pid of m.1.w1",)
    assert search.begin() == Build(pids)
    search.try_(x(1))
    search.try_(x(2), unfit=(x(1),))
    assert search.die() == [Spawn("m.1.holder2", Role.HOLDER)]
    generation = search.generation
    assert (generation.state, generation.deaths, generation.outlook) == (GenerationState.GATHERING, 0, Outlook.SAME)
    assert search.begin("m.1.holder2") == Build(pids, unfit=(x(1), x(2)))
    search.try_(x(32), holder="m.1.holder2", unfit=(x(1), x(2)))
    generation.holder_built("m.1.holder2", Built("7", (X,), (X,), (x(32),), "canary", 4096), search.now)
    assert generation.state is GenerationState.ATTACHING
    assert generation.canary == "x [1, 32]"
    assert generation.tries.known == Canary(cases=(x(32),), unfit=(x(1), x(2)))


def test_one_that_gives_up_its_process_by_itself_is_waited_for_first() -> None:
    search = Search(fixed=True)
    search.begin()
    search.try_(x(1))
    search.generation.broken("m.1.holder", Broken("it does not run on the canary"), search.now)
    assert not [each for each in search.generation.take_actions() if isinstance(each, Spawn)]
    assert search.die(end=End(3)) == [Spawn("m.1.holder2", Role.HOLDER)]
    assert search.begin("m.1.holder2").unfit == (x(1),)


def test_a_death_out_of_a_try_is_what_it_was() -> None:
    for tries in ((), ((x(1),), ())):
        search = Search()
        search.begin()
        for cases in tries:
            search.try_(*cases)
        assert not [each for each in search.die() if isinstance(each, Spawn)]
        generation = search.generation
        assert (generation.state, generation.deaths, generation.outlook) == (GenerationState.FAILED, 1, Outlook.BETTER)


@pytest.mark.parametrize("canary", [Canary(), Canary(search=False, cases=(x(7),))])
def test_what_a_holder_tried_that_was_killed_from_outside_is_tried_again_once(canary: Canary) -> None:
    search = Search(canary)
    order = search.begin()
    search.try_(x(7))
    assert search.die(end=End(-signal.SIGKILL)) == [Spawn("m.1.holder2", Role.HOLDER)]
    assert search.begin("m.1.holder2") == order
    search.try_(x(7), holder="m.1.holder2")
    again = search.die("m.1.holder2", End(-signal.SIGKILL, by=By.KERNEL))
    generation = search.generation
    assert generation.deaths == 2
    if canary.search:
        assert again == [Spawn("m.1.holder3", Role.HOLDER)]
        assert search.begin("m.1.holder3").unfit == (x(7),)
    else:
        # The deployment waits, and loads it anew.
        assert (generation.state, generation.outlook) == (GenerationState.FAILED, Outlook.BETTER)


def test_after_some_deaths_the_next_holder_builds_without_a_canary() -> None:
    search = Search()
    holders = ["m.1.holder", *(f"m.1.holder{number}" for number in range(2, MAX_DEATHS + 2))]
    for size, holder in enumerate(holders[:-1], 1):
        assert search.begin(holder).search
        search.try_(x(size), holder=holder, unfit=tuple(map(x, range(1, size))))
        search.die(holder)
    order = search.begin(holders[-1])
    assert (order.search, order.canary_cases, len(order.unfit)) == (False, (), MAX_DEATHS)
    without = Built("7", (X,), (X,), (), "", 4096, canary_note="the search was given up")
    search.generation.holder_built(holders[-1], without, search.now)
    assert search.generation.state is GenerationState.ATTACHING
    assert search.generation.canary == "none: the search was given up"
    # The next generation does not begin anew.
    assert not search.generation.tries.known.search


def test_the_list_of_what_is_unfit_stays_within_the_wire() -> None:
    search = Search()
    search.begin()
    many = tuple(map(x, range(limits.MAX_CANARY_UNFIT)))
    search.try_(x(99), unfit=many)
    search.die()
    assert search.begin("m.1.holder2") == Build((*["pid of m.1.w1"],), search=False, unfit=many)


def test_one_that_takes_too_long_ends_the_search() -> None:
    search = Search()
    search.begin()
    search.try_(x(1))
    search.generation.tick(search.now + 600.0)
    assert Kill("m.1.holder", abort=True) in search.generation.take_actions()
    assert search.generation.deaths == 0
    search.now += 600.0 + ABORT_TIMEOUT_S
    assert Spawn("m.1.holder2", Role.HOLDER) in search.die(end=End(-signal.SIGABRT))
    order = search.begin("m.1.holder2")
    assert (order.search, order.unfit) == (False, (x(1),))


@pytest.mark.parametrize("end", [SEGV, End(3)])
def test_a_configured_canary_that_kills_is_the_cause_and_not_tried_again(end: End) -> None:
    search = Search(Canary(search=False, cases=(x(7),)))
    order = search.begin()
    assert (order.search, order.canary_cases) == (False, (x(7),))
    search.try_(x(7))
    search.die(end=end)
    generation = search.generation
    assert (generation.state, generation.outlook) == (GenerationState.FAILED, Outlook.SAME)
    assert generation.cause == f"m.1.holder: {end}; it ran the configured canary, x [1, 7]"


def test_what_an_earlier_generation_has_found_comes_first() -> None:
    known = Canary(cases=(x(48), x(96)), unfit=(x(1),))
    search = Search(known=known)
    order = search.begin()
    assert (order.search, order.canary_cases, order.unfit) == (True, known.cases, known.unfit)
    search.try_(*known.cases, unfit=known.unfit)
    search.die()
    assert search.begin("m.1.holder2") == dataclasses.replace(order, canary_cases=(), unfit=(x(1), x(48), x(96)))


def test_nobody_else_probes() -> None:
    search = Search()
    for name in ("m.1.w1", "m.1.holder", "stranger"):
        search.generation.probing(name, Probing((x(1),), ()))
    assert search.generation.take_actions() == []
