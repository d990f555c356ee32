"""Where weights are not shared: because the card cannot and it may fall back, or because they are to be changed."""

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
    """A model that was converted for other weights, which the library does not share."""
    return cards.mlp("bundle", bundle=True)


def test_auto_falls_back_to_weights_of_their_own_where_they_cannot_be_shared(cards: Cards, bundle: Path) -> None:
    tables = {MODEL: on_card(bundle, sharing="auto", workers=1)}
    with cards.service(tables) as service, service.client() as client:
        ask_all(client, MODEL, questions(bundle))
        until(lambda: serves(service, 2), "all that is left serves")
        assert "weights cannot be shared, so each worker loads its own copy" in service.log
        kinds = [each.kind for each in cards.host.card_state(0).allocations if "weights" in each.kind]
        assert kinds == ["private weights"] * 2
        # Nobody has to be let in: a lost worker is replaced as on the CPU.
        kill(service, "worker")
        until(lambda: names(service, "spare") == ["mlp.2.w3"], "it is replaced")
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
            until(lambda: names(service, "spare") == ["mlp.2.w3"], "a new one has the new weights, too")
            kill(service, "worker")
            until(lambda: names(service, "worker") == ["mlp.2.w3"], "it works")
            load.wait_for(50)
