"""A model compiled for certain batch sizes only, on simulated cards, with requests of any number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ascendsim import models
from testkit.service import Service
from testkit.waiting import until
from weightd import InvalidArgument

from ..support import Load, SampleRequest, ask_all, mlp_inputs
from .support import MODEL, WIDTH, Cards, kill, on_card, status

pytestmark = pytest.mark.e2e

DEVICES = ["ascend:0", "ascend:1"]


def table(
    cards: Cards, name: str, sizes: Sequence[int], *, has_gear_info: bool = False, **more: object
) -> dict[str, object]:
    """Return the table of a model compiled for 2 and 8 rows; `has_gear_info`: the file lists these sizes."""
    path = models.mlp(cards.directory / f"{name}.mindir", width=WIDTH, gears=(2, 8), has_gear_info=has_gear_info)
    return on_card(path, **{"workers": 1, "spares": 0, "batching": {"sizes": sizes}, **more})


def asked(cards: Cards, name: str, rows: Sequence[int]) -> list[SampleRequest]:
    path = cards.directory / f"{name}.mindir"
    return [SampleRequest(inputs, models.answers(path, dict(inputs))) for inputs in mlp_inputs(rows, WIDTH)]


@pytest.fixture(scope="module")
def service(cards: Cards) -> Iterator[Service]:
    tables = {
        MODEL: table(cards, MODEL, (2, 8), devices=DEVICES, split={"part_rows": 8, "max_rows": 64}),
        "informed": table(cards, "informed", (2, 8), has_gear_info=True),
        "wrong": table(cards, "wrong", (2, 4, 8)),
    }
    with cards.service(tables) as service:
        service.ready()
        yield service


def test_batches_pads_and_splits_requests_on_two_cards(cards: Cards, service: Service) -> None:
    questions = asked(cards, MODEL, (1, 2, 3, 8, 1, 1, 9, 61, 5, 64, 1, 7))
    with Load(service.address, MODEL, questions) as load:
        load.wait_for(20)
        lost = kill(service, "worker")
        until(lambda: lost in service.log and service.ready(), "the worker is replaced")
        load.wait_for(20)
    after = status(service)
    assert after.failed == 0
    assert all(each.batching_note.endswith("tested bit-equal") for each in after.generations)
    assert after.executions
    assert after.executions.padded
    assert after.executions.split


def test_rejects_row_counts_that_card_cannot_run(cards: Cards, service: Service) -> None:
    with service.client() as client:
        ask_all(client, "informed", asked(cards, "informed", (1, 2, 3, 8)))
        with pytest.raises(InvalidArgument, match=r"input x: expected at most 8 rows \(the largest of batching.sizes"):
            client.infer("informed", mlp_inputs((9,), WIDTH)[0])
        ask_all(client, "wrong", asked(cards, "wrong", (1, 2, 5, 8)))
        with pytest.raises(InvalidArgument, match="Current batch size 4 is invalid"):
            client.infer("wrong", mlp_inputs((3,), WIDTH)[0])
        ask_all(client, "wrong", asked(cards, "wrong", (1, 2, 5, 8)))
    assert "wrong.1: rows of requests: the model does not run on 4 rows: " in service.log
