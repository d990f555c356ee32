"""A daemon after another one, on a card: nothing is loaded again, and what was true of the weights stays true."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from testkit.managed import ManagedService
from testkit.waiting import until

from ..support import ask_all
from .support import MODEL, Cards, device, kill, names, questions, serves, status, wait_for_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def service(cards: Cards) -> Iterator[ManagedService]:
    """On a card where what is left of a holder that has died is somebody else's memory."""
    cards.host.switch(lifetime="strict", after_death="garbage")
    with cards.managed() as service:
        yield service


def answers_rightly(service: ManagedService, cards: Cards) -> None:
    with service.client() as client:
        ask_all(client, MODEL, questions(cards.model))


def test_the_weights_stay_on_the_card(cards: Cards, service: ManagedService) -> None:
    def all_of_it() -> object:
        told = device(service)
        processes = [(each.name, each.pid) for each in service.processes()]
        return processes, told.capacity_bytes, told.weights_bytes, told.process_bytes, told.processes

    before, builds = all_of_it(), cards.host.count("build")
    for number in (signal.SIGTERM, signal.SIGKILL):
        service.restart(number)
        answers_rightly(service, cards)
        wait_for_all(service)
    assert all_of_it() == before
    assert (cards.host.count("build"), cards.host.copies_of_weights(0)) == (builds, 1)


def test_a_replacement_is_let_in_by_the_holder_of_the_daemon_before(cards: Cards, service: ManagedService) -> None:
    kill(service, "worker")
    until(lambda: names(service, "spare") == ["mlp.1.w4"], "a new spare is attached")
    assert serves(service, 1)
    answers_rightly(service, cards)


def test_a_holder_that_died_meanwhile_has_taken_its_generation_along(cards: Cards, service: ManagedService) -> None:
    [holder] = [each.pid for each in service.processes() if each.role == "holder"]
    os.kill(service.pid, signal.SIGKILL)
    service.wait()
    os.kill(holder, signal.SIGKILL)
    service.start_again()
    answers_rightly(service, cards)
    until(lambda: serves(service, 2), "the second generation serves alone")
    assert status(service).failed == 0
