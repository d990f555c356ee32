"""A daemon after another one, on a card: nothing is loaded again, and what was true of the weights stays true."""

from __future__ import annotations

import os
import signal

import pytest

from testkit.waiting import until

from ..support import ask_all
from .support import Cards, device, is_complete, kill, process, questions, roles, serves, status

pytestmark = pytest.mark.e2e


def test_the_weights_stay_on_the_card(cards: Cards) -> None:
    with cards.managed() as service:
        before, card = service.processes(), device(service)
        builds = cards.host.count("build")
        for number in (signal.SIGTERM, signal.SIGKILL):
            service.restart(number)
            with service.client() as client:
                ask_all(client, "mlp", questions(cards.model))
            until(lambda: is_complete(service), "the spares are READY")
        assert [(each.name, each.pid) for each in service.processes()] == [(each.name, each.pid) for each in before]
        after = device(service)
        assert (after.capacity_bytes, after.weights_bytes, after.process_bytes, after.processes) == (
            card.capacity_bytes,
            card.weights_bytes,
            card.process_bytes,
            card.processes,
        )
        assert cards.host.count("build") == builds
        assert cards.host.copies_of_weights(0) == 1


def test_a_replacement_is_let_in_by_the_holder_of_the_daemon_before(cards: Cards) -> None:
    with cards.managed() as service:
        service.restart(signal.SIGKILL)
        until(lambda: is_complete(service), "the spares are READY")
        kill(service, "w1")
        until(lambda: roles(service).get("w4") == "spare", "a new spare is attached")
        assert serves(service, 1)
        with service.client() as client:
            ask_all(client, "mlp", questions(cards.model))


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_holder_that_dies_takes_its_generation_along(cards: Cards, meanwhile: bool) -> None:
    cards.host.switch(lifetime="strict", after_death="garbage")
    with cards.managed() as service:
        holder = process(service, "holder").pid
        os.kill(service.pid, signal.SIGKILL)
        service.wait()
        if meanwhile:
            os.kill(holder, signal.SIGKILL)
        service.start_again()
        with service.client() as client:
            if not meanwhile:
                ask_all(client, "mlp", questions(cards.model))
                os.kill(holder, signal.SIGKILL)
            ask_all(client, "mlp", questions(cards.model))
        until(lambda: serves(service, 2), "the second generation serves alone")
        assert status(service).failed == 0
