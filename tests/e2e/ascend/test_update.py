"""Another model beside the one that serves: it takes over whole, or nothing changes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd.client import Client, FailedPrecondition, InvalidArgument, Pending, Unavailable
from weightd.protocol.errors import RequestError

from ..support import Load, Question, ask_all
from .support import Cards, questions, serves, status

pytestmark = pytest.mark.e2e


def weightctl(service: Service, *arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "weightd.ctl", "--socket", service.address, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


class EitherLoad(Load):
    """As `Load`, but the answers may be those of one of two models; counts which."""

    def __init__(self, service: Service, old: Path, new: Path) -> None:
        super().__init__(service.address, "mlp", questions(old))
        self._new = {question.inputs["x"].tobytes(): question.answer["y"] for question in questions(new)}
        self.of_new = 0

    def _check(self, pending: Pending, question: Question) -> None:
        answer = pending.result()["y"]
        if np.array_equal(answer, self._new[question.inputs["x"].tobytes()]):
            self.of_new += 1
        else:
            assert np.array_equal(answer, question.answer["y"])
        self.answered += 1


def test_update_and_rollback_lose_no_request(cards: Cards) -> None:
    devices = ["ascend:0", "ascend:1"]
    new = cards.mlp("new", seed=7)
    count, old = len(devices), questions(cards.model)
    with cards.ready(devices=devices) as (service, client):
        with EitherLoad(service, cards.model, new) as load:
            load.wait_for(50)
            done = weightctl(service, "update", "mlp", new)
            assert done[0] == 0, done
            assert re.fullmatch(
                rf"mlp: generations? [\d, ]+ took over, {new}\n.* goes back to {cards.model}: .*\n", done[1]
            )
            assert status(service).path == str(new)
            ask_all(client, "mlp", questions(new))
            load.wait_for(50)
            assert load.of_new
            # The file may be gone: what served is kept.
            cards.model.unlink()
            assert weightctl(service, "update", "mlp", "--rollback")[0] == 0
            assert "rolled back already" in weightctl(service, "update", "mlp", "--rollback")[2]
            ask_all(client, "mlp", old)
        assert status(service).failed == 0
        until(lambda: len(status(service).generations) == count, "the others are gone")
        assert [cards.host.copies_of_weights(index) for index in range(2)] == [1, count - 1]


def refused(client: Client, path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        client.update("mlp", str(path))
    return str(caught.value)


def test_a_bad_new_model_leaves_the_old_one_serving(cards: Cards) -> None:
    junk = cards.directory / "junk.mindir"
    junk.write_bytes(b"junk" * 1000)
    with cards.ready() as (service, client):
        with Load(service.address, "mlp", questions(cards.model)) as load:
            assert "not updated: mlp.2.holder: build_from_file failed!" in refused(client, junk)
            text = refused(client, cards.mlp("narrow", width=32))
            assert "not a drop-in" in text
            assert "inputs: expected x FP32 [-1, 64], got x FP32 [-1, 32]" in text
            assert "missing.mindir: No such file" in refused(client, cards.directory / "missing.mindir")
            load.wait_for(50)
        until(lambda: len(status(service).generations) == 1, "the others are gone")
        ask_all(client, "mlp", questions(cards.model))
        assert cards.host.copies_of_weights(0) == 1


def test_a_second_copy_that_has_no_room_is_refused_with_the_figures(cards: Cards) -> None:
    new = cards.mlp("new", seed=7)
    with cards.ready(memory_mib=1000, process_mib=220) as (service, client):
        builds = cards.host.count("build")
        status_, _, text = weightctl(service, "update", "mlp", new)
        assert status_ == 1
        pattern = (
            r"FAILED_PRECONDITION: not updated: ascend:0 has no room: mlp\.2 needs 882 MiB \(one copy of 2 MiB "
            r"weights, 4 processes of 220 MiB\), 118 MiB of 1,000 MiB are free; mlp\.1 has 882 MiB\n"
        )
        assert re.fullmatch(pattern, text), text
        assert cards.host.count("build") == builds
        ask_all(client, "mlp", questions(cards.model))


def test_what_cannot_be_asked_for(cards: Cards) -> None:
    with cards.ready() as (service, client):
        with pytest.raises(FailedPrecondition, match="there is nothing to go back to"):
            client.update("mlp", rollback=True)
        with pytest.raises(InvalidArgument, match="absolute path"):
            client.update("mlp", "relative.mindir")
        with pytest.raises(InvalidArgument, match="expected a path, weights, or rollback alone"):
            client.update("mlp")
        with pytest.raises(InvalidArgument, match="expected a path, weights, or rollback alone"):
            client.update("mlp", "/x.mindir", rollback=True)
        assert weightctl(service, "update", "mlp")[0] == 64
        assert weightctl(service, "update", "mlp", cards.directory / "none.mindir")[0] == 66
        assert weightctl(service, "update", "other", cards.model)[0] == 1
        assert serves(service, 1)


def test_one_update_at_a_time_and_it_goes_on_without_who_asked_for_it(cards: Cards) -> None:
    new = cards.mlp("new", seed=7)
    with cards.ready() as (service, client):
        cards.host.fault("build", "slow", "holder", seconds=1.0)
        command = [sys.executable, "-m", "weightd.ctl", "--socket", service.address, "update", "mlp", str(new)]
        with subprocess.Popen(command) as process:
            until(lambda: len(status(service).generations) == 2, "it loads")
            with pytest.raises(Unavailable, match="is being updated already"):
                client.update("mlp", str(new))
            process.kill()
        ask_all(client, "mlp", questions(cards.model))
        until(lambda: serves(service, 2), "the new model serves")
        ask_all(client, "mlp", questions(new))
