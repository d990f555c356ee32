"""Where weights are not shared: because the configuration says so, or because the card cannot and it may fall back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import models
from testkit.waiting import until
from weightd.client import FailedPrecondition

from ..support import Load, ask_all
from .support import Cards, kill, questions, roles, serves, status

pytestmark = pytest.mark.e2e


def test_without_sharing_each_worker_has_its_own_weights(cards: Cards) -> None:
    with cards.ready(sharing="off") as (service, client):
        ask_all(client, "mlp", questions(cards.model))
        until(lambda: "holder" not in roles(service), "the holder has left")
        kinds = [each.kind for each in cards.host.ledger(0).allocations if "weights" in each.kind]
        assert kinds == ["private weights"] * 3
        # Nobody has to be let in: a lost worker is replaced as on the CPU.
        kill(service, "w1")
        until(lambda: roles(service).get("w4") == "spare", "it is replaced")
        ask_all(client, "mlp", questions(cards.model))
        assert serves(service, 1)
        [generation] = status(service).generations
        assert all("sharing is off" in each.note for each in generation.processes)
        assert generation.saved_bytes == 0


def test_auto_falls_back_to_weights_of_their_own_where_they_cannot_be_shared(cards: Cards) -> None:
    bundle = cards.mlp("bundle", bundle=True)
    with cards.service(path=bundle, sharing="auto") as service, service.client() as client:
        ask_all(client, "mlp", questions(bundle))
        until(lambda: serves(service, 2), "all that is left serves")
        assert "cannot share weights, so each worker gets its own" in service.log
        kinds = [each.kind for each in cards.host.ledger(0).allocations if "weights" in each.kind]
        assert kinds == ["private weights"] * 3


# --- other weights for a model that was converted for it ------------------------------------------------------------


def weights_for(cards: Cards, seed: int) -> tuple[str, Path]:
    """Write the weights of another model as arrays; return the file, and that model."""
    other = cards.mlp(f"other{seed}", bundle=True, seed=seed)
    file = cards.directory / f"weights{seed}.npz"
    arrays: dict[str, Any] = {**models.weights(other)}
    np.savez(file, **arrays)
    return str(file), other


def test_update_weights_reaches_every_worker(cards: Cards) -> None:
    bundle = cards.mlp("bundle", bundle=True)
    file, other = weights_for(cards, 5)
    options = {"variable_weights": True}
    with cards.ready(path=bundle, sharing="off", mindspore_lite=options) as (service, client):
        ask_all(client, "mlp", questions(bundle))
        command = [sys.executable, "-m", "weightd.ctl", "--socket", service.address, "update-weights", "mlp"]
        done = subprocess.run([*command, file], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        until(lambda: serves(service, 2), "the new weights serve")
        right = questions(other)
        with Load(service.address, "mlp", right) as load:
            load.wait_for(50)
            kill(service, "w1")
            load.wait_for(20)
            until(lambda: roles(service).get("w4") == "spare", "a new one has the new weights, too")
            kill(service, "w2")
            until(lambda: roles(service).get("w4") == "worker", "it works")
            load.wait_for(50)
        client.update("mlp", rollback=True)
        ask_all(client, "mlp", questions(bundle))


def test_weights_that_do_not_fit_change_nothing(cards: Cards) -> None:
    bundle = cards.mlp("bundle", bundle=True)
    wrong = cards.directory / "wrong.npz"
    np.savez(wrong, nothing=np.zeros(3, np.float32))
    junk = cards.directory / "junk.npz"
    junk.write_bytes(b"junk")
    options = {"variable_weights": True}
    with cards.ready(path=bundle, sharing="off", mindspore_lite=options) as (service, client):
        for file in (wrong, junk):
            with pytest.raises(FailedPrecondition, match="not updated"):
                client.update("mlp", weights=str(file))
        ask_all(client, "mlp", questions(bundle))
        until(lambda: serves(service, 1), "nothing else is left")


def test_one_worker_that_cannot_take_the_weights_is_enough_to_change_nothing(cards: Cards) -> None:
    bundle = cards.mlp("bundle", bundle=True)
    file, _ = weights_for(cards, 5)
    options = {"variable_weights": True}
    with cards.ready(path=bundle, sharing="off", mindspore_lite=options) as (service, client):
        # The holder and the first worker of the next generation load; none of the others ever does.
        cards.host.fault("build", "fail", "private", skip=2)
        with pytest.raises(FailedPrecondition, match="not updated"):
            client.update("mlp", weights=file)
        cards.host.clear_faults()
        ask_all(client, "mlp", questions(bundle))
        until(lambda: serves(service, 1), "nothing else is left")
