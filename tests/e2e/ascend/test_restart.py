"""Restart of the daemon with weights on a simulated card: no model is loaded again, and the weights stay valid."""

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
    """A service on a card that reuses the memory of a dead holder for other data."""
    cards.host.switch(lifetime="strict", after_death="garbage")
    with cards.managed() as service:
        yield service


def assert_right_answers(service: ManagedService, cards: Cards) -> None:
    with service.client() as client:
        ask_all(client, MODEL, questions(cards.model))


def test_weights_stay_on_card_across_restart(cards: Cards, service: ManagedService) -> None:
    def card_and_processes() -> object:
        card = device(service)
        processes = [(each.name, each.pid) for each in service.processes()]
        return processes, card.capacity_bytes, card.weights_bytes, card.process_bytes, card.processes

    before, builds = card_and_processes(), cards.host.count("build")
    for number in (signal.SIGTERM, signal.SIGKILL):
        service.restart(number)
        assert_right_answers(service, cards)
        wait_for_all(service)
    assert card_and_processes() == before
    assert (cards.host.count("build"), cards.host.copies_of_weights(0)) == (builds, 1)


def test_surviving_holder_attaches_new_worker(cards: Cards, service: ManagedService) -> None:
    kill(service, "worker")
    until(lambda: names(service, "spare") == ["mlp.1.w4"], "a new spare is attached")
    assert serves(service, 1)
    assert_right_answers(service, cards)


def test_replaces_generation_of_holder_killed_during_restart(cards: Cards, service: ManagedService) -> None:
    [holder] = [each.pid for each in service.processes() if each.role == "holder"]
    os.kill(service.pid, signal.SIGKILL)
    service.wait()
    os.kill(holder, signal.SIGKILL)
    service.start_again()
    assert_right_answers(service, cards)
    until(lambda: serves(service, 2), "the second generation serves alone")
    assert status(service).failed == 0
