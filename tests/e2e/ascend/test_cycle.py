"""The whole cycle on one and two cards: one copy of the weights on each, and nothing left at the end."""

from __future__ import annotations

import re

import pytest

from testkit.waiting import until
from weightd.ctl.status import pss_total, render

from ..support import ask_all
from .support import MIB, Cards, device, questions, roles, status

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("number", [1, 2])
def test_the_weights_are_on_each_card_once(cards: Cards, number: int) -> None:
    devices = [f"ascend:{index}" for index in range(number)]
    with cards.ready(workers=4, devices=devices) as (service, client):
        ask_all(client, "mlp", questions(cards.model))
        for index in range(number):
            card = cards.host.ledger(index)
            [weights] = [each for each in card.allocations if "weights" in each.kind]
            assert weights.kind == "weights"
            assert len(weights.importers) == 5
            assert len(card.processes) == 6
            # The driver's pids are not this machine's.
            pids = {each.pid for each in service.processes()}
            assert not pids & set(weights.whitelist)
        generations = status(service).generations
        assert [each.device for each in generations] == devices
        for each in generations:
            assert [process.role for process in each.processes] == ["holder", *["worker"] * 4, "spare"]
        assert service.stop() == 0
    assert [cards.host.ledger(index).allocations for index in range(2)] == [(), ()]


def test_every_worker_of_both_cards_answers(cards: Cards) -> None:
    with cards.ready(devices=["ascend:0", "ascend:1"]) as (service, client):
        for _ in range(5):
            ask_all(client, "mlp", questions(cards.model))
        served = [each.served for generation in status(service).generations for each in generation.processes]
        assert [bool(each) for each in served] == [False, True, True, False] * 2


def test_status_shows_what_the_card_has(cards: Cards) -> None:
    with cards.ready() as (service, _):
        card = cards.host.ledger(0)
        told = device(service)
        weights = sum(each.bytes for each in card.allocations if each.kind == "weights")
        assert (told.weights_bytes, told.processes, told.max_processes) == (weights, 4, 63)
        assert told.saved_bytes == 2 * weights
        # What a process takes beside the weights is seen when it attaches.
        others = sum(each.bytes for each in card.allocations if each.kind != "weights")
        assert told.process_bytes == others
        assert (told.capacity_bytes, told.free_bytes) == (card.capacity - 200 * MIB, card.free)
        answer = service.status()
        text = render(answer, pss_total(answer))
        assert re.search(r"ascend:0: [\d.]+ MB of [\d.]+ GB, 4 of 63 processes", text), text
        assert re.search(r"weights 2\.1 MB once, processes [\d.]+ MB beside them, sharing saves 4\.2 MB", text), text


def test_workers_leave_before_the_holder(cards: Cards) -> None:
    with cards.service(verbose=True) as service:
        service.ready()
        until(lambda: roles(service).get("w3") == "spare", "the spare is READY")
        assert service.stop() == 0
        gone = re.findall(r"mlp\.1\.(\w+): \w+ -> gone", service.log)
        assert gone[-1] == "holder", service.log
        assert sorted(gone) == ["holder", "w1", "w2", "w3"]
        told_to_stop = service.log.index("mlp.1.holder: holding -> stopping")
        assert all(service.log.index(f"mlp.1.{each}: stopping -> gone") < told_to_stop for each in gone[:-1])


def test_attaches_come_one_after_another(cards: Cards) -> None:
    cards.host.switch(build_seconds=0.2)
    with cards.service(verbose=True, workers=3) as service:
        service.ready()
        steps = re.findall(r"mlp\.1\.w\d: (\w+) -> (\w+)", service.log)
    attaching = 0
    for before, after in steps:
        attaching += (after == "attaching") - (before == "attaching")
        assert attaching <= 1
