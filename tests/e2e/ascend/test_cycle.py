"""A model on two cards, from start to stop: one copy of the weights per card, also after updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd import Client, FailedPrecondition, Pending

from ..support import Load, SampleRequest, ask_all
from .support import MODEL, Cards, device, questions, status

pytestmark = pytest.mark.e2e

DEVICES = ["ascend:0", "ascend:1"]


@pytest.fixture(scope="module")
def service(cards: Cards) -> Iterator[Service]:
    with cards.ready(devices=DEVICES, workers=1) as service:
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def test_each_card_has_one_copy_of_weights(cards: Cards, service: Service) -> None:
    for index in range(2):
        card = cards.host.card_state(index)
        [weights] = [each for each in card.allocations if "weights" in each.kind]
        assert (weights.kind, len(weights.importers), len(card.processes)) == ("weights", 2, 3)
        # The driver has a different PID namespace.
        assert not {each.pid for each in service.processes()} & set(weights.whitelist)
    generations = status(service).generations
    assert [each.device for each in generations] == DEVICES
    assert [[process.role for process in each.processes] for each in generations] == [["holder", "worker", "spare"]] * 2


def test_status_shows_memory_of_card(cards: Cards, service: Service) -> None:
    card, shown = cards.host.card_state(0), device(service)
    weights = sum(each.bytes for each in card.allocations if each.kind == "weights")
    assert (shown.weights_bytes, shown.processes, shown.max_processes) == (weights, 3, 63)
    assert shown.saved_bytes == weights
    # The daemon measures the other memory of a process when the process attaches.
    assert shown.process_bytes == sum(each.bytes for each in card.allocations if each.kind != "weights")
    # The first measurement of free memory included one context.
    assert (shown.capacity_bytes, shown.free_bytes) == (card.capacity - 200 * 1024 * 1024, card.capacity - card.used)


def test_workers_of_both_cards_serve_and_spares_do_not(cards: Cards, service: Service, client: Client) -> None:
    def all_have_served() -> bool:
        ask_all(client, MODEL, questions(cards.model))
        return all(each.served for each in service.processes() if each.role == "worker")

    until(all_have_served, "both workers have served")
    assert not any(each.served for each in service.processes() if each.role != "worker")


class EitherLoad(Load):
    """Load whose answers may come from either of two models; `of_new` counts answers of the second one."""

    def __init__(self, service: Service, old: Path, new: Path) -> None:
        super().__init__(service.address, MODEL, questions(old))
        self._new = {question.inputs["x"].tobytes(): question.answer["y"] for question in questions(new)}
        self.of_new = 0

    def _check(self, pending: Pending, question: SampleRequest) -> None:
        answer = pending.result()["y"]
        if np.array_equal(answer, self._new[question.inputs["x"].tobytes()]):
            self.of_new += 1
        else:
            assert np.array_equal(answer, question.answer["y"])
        self.answered += 1


def test_update_and_rollback_lose_no_request(cards: Cards, service: Service, client: Client) -> None:
    old, new = questions(cards.model), cards.mlp("new", seed=7)
    with EitherLoad(service, cards.model, new) as load:
        load.wait_for(50)
        assert len(client.update(MODEL, str(new)).generations) == len(DEVICES)
        assert status(service).path == str(new)
        ask_all(client, MODEL, questions(new))
        load.wait_for(50)
        assert load.of_new
        # Rollback uses the snapshot, so the file may be missing.
        cards.model.unlink()
        client.update(MODEL, rollback=True)
        ask_all(client, MODEL, old)
    assert status(service).failed == 0
    until(lambda: len(status(service).generations) == len(DEVICES), "the other generations exit")
    assert [cards.host.copies_of_weights(index) for index in range(2)] == [1, 1]
    cards.mlp(MODEL)


def test_failed_update_keeps_old_model(cards: Cards, service: Service, client: Client) -> None:
    junk = cards.directory / "junk.mindir"
    junk.write_bytes(b"junk" * 1000)
    with pytest.raises(FailedPrecondition, match=r"not updated: mlp\.\d+\.holder: build_from_file failed!"):
        client.update(MODEL, str(junk))
    until(lambda: len(status(service).generations) == len(DEVICES), "the other generations exit")
    ask_all(client, MODEL, questions(cards.model))


def test_stop_frees_memory_of_cards(cards: Cards, service: Service) -> None:
    """Stops the service, so this test must be the last one."""
    assert service.stop() == 0
    assert [cards.host.card_state(index).allocations for index in range(2)] == [(), ()]
