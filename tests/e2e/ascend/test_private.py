"""Private copies of the weights: as a fallback, and for models with variable weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import models
from testkit.waiting import until

from ..support import Load, ask_all
from .support import MODEL, Cards, kill, names, on_card, questions, serves

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def bundle(cards: Cards) -> Path:
    """A model converted with variable weights, which the library cannot share."""
    return cards.mlp("bundle", bundle=True)


def test_auto_falls_back_to_private_copies(cards: Cards, bundle: Path) -> None:
    tables = {MODEL: on_card(bundle, sharing="auto", workers=1)}
    with cards.service(tables) as service, service.client() as client:
        ask_all(client, MODEL, questions(bundle))
        until(lambda: serves(service, 2), "only the second generation serves")
        assert "weights cannot be shared, so each worker loads its own copy" in service.log
        kinds = [each.kind for each in cards.host.card_state(0).allocations if "weights" in each.kind]
        assert kinds == ["private weights"] * 2
        # No attach is needed: a lost worker is replaced as on the CPU.
        kill(service, "worker")
        until(lambda: names(service, "spare") == ["mlp.2.w3"], "the worker is replaced")
        ask_all(client, MODEL, questions(bundle))


def test_update_weights_reaches_every_worker(cards: Cards, bundle: Path) -> None:
    other = cards.mlp("other", bundle=True, seed=5)
    file = cards.directory / "weights.npz"
    arrays: dict[str, Any] = {**models.weights(other)}
    np.savez(file, **arrays)
    options = {"variable_weights": True}
    with (
        cards.ready(path=bundle, sharing="off", mindspore_lite=options, workers=1) as service,
        service.client() as client,
    ):
        ask_all(client, MODEL, questions(bundle))
        client.update(MODEL, weights=str(file))
        until(lambda: serves(service, 2), "the new weights serve")
        with Load(service.address, MODEL, questions(other)) as load:
            load.wait_for(50)
            kill(service, "worker")
            until(lambda: names(service, "spare") == ["mlp.2.w3"], "the new spare has the new weights")
            kill(service, "worker")
            until(lambda: names(service, "worker") == ["mlp.2.w3"], "the spare has become a worker")
            load.wait_for(50)
