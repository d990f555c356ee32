"""What a card can do to a worker without a word: none of it reaches a client."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd.client import Client, FailedPrecondition

from ..support import Load, ask_all, assert_same
from .support import MODEL, Cards, is_complete, kill, process, questions, roles, status

pytestmark = pytest.mark.e2e


def cause_of_failure(service: Service, client: Client, cards: Cards) -> str:
    """Wait until the model has failed; return what a client is told."""
    until(lambda: status(service).state == "failed", "it fails")
    return refusal(client, MODEL, cards)


def refusal(client: Client, model: str, cards: Cards) -> str:
    """Return what a client is told of a model that has failed."""
    with pytest.raises(FailedPrecondition) as caught:
        ask_all(client, model, questions(cards.model))
    return str(caught.value)


def test_a_refused_import_that_looks_like_success_is_told_with_its_cause(cards: Cards) -> None:
    cards.host.switch(vnpu=True)
    with cards.service() as service, service.client() as client:
        text = cause_of_failure(service, client, cards)
        assert "build_from_file failed!" in text
        # The first error line of the native log, not the misleading last one alone.
        assert "mem import from shareable handle failed" in text
        assert "please Keep the main process running" in text


def test_workers_that_compute_on_corrupted_weights_do_not_serve(cards: Cards) -> None:
    cards.host.fault("predict", "garbage", "importer")
    with cards.service() as service, service.client() as client:
        assert "the canary's answer is not the holder's" in cause_of_failure(service, client, cards)


def test_a_holder_that_gives_no_handle_is_told_with_what_may_be_the_reason(cards: Cards) -> None:
    bundle = cards.mlp("bundle", bundle=True)
    with cards.service(path=bundle) as service, service.client() as client:
        text = cause_of_failure(service, client, cards)
        assert "got handle ''" in text
        assert "variable_weights" in text


def test_the_file_may_be_replaced_at_any_time(cards: Cards) -> None:
    """Each attach writes the weights anew, from its own file: it must be the one that the holder had."""
    right = questions(cards.model)
    with cards.ready() as (service, client):
        with Load(service.address, MODEL, right) as load:
            other = cards.mlp("other", seed=9)
            assert other.stat().st_size == cards.model.stat().st_size
            shutil.copyfile(other, cards.model)
            load.wait_for(20)
            kill(service, "w1")
            until(lambda: roles(service).get("w4") == "spare", "a new one is attached")
            load.wait_for(50)
        ask_all(client, MODEL, right)


def test_the_file_may_be_replaced_between_the_holders_build_and_a_workers(cards: Cards) -> None:
    right = questions(cards.model)
    other = cards.mlp("other", seed=9)
    cards.host.fault("build", "slow", "importer", seconds=0.5)
    with cards.service() as service, service.client() as client:
        until(lambda: status(service).state == "attaching", "the holder has built, the workers have not")
        shutil.copyfile(other, cards.model)
        ask_all(client, MODEL, right)
        until(lambda: is_complete(service), "all are attached")
        for _ in range(3):
            ask_all(client, MODEL, right)


def test_a_snapshot_that_was_tampered_with_is_not_loaded(cards: Cards) -> None:
    right = questions(cards.model)
    with cards.ready() as (service, client):
        [snapshot] = Path(service.cache).rglob("model/*.mindir")
        other = cards.mlp("other", seed=9)
        snapshot.chmod(0o600)
        shutil.copyfile(other, snapshot)
        with Load(service.address, MODEL, right) as load:
            kill(service, "w1")
            until(lambda: "it would load a model of sha256" in service.log, "the replacement is refused")
            load.wait_for(50)
        ask_all(client, MODEL, right)


@pytest.mark.parametrize(("who", "how"), [("holder", "crash"), ("importer", "hang")])
def test_a_build_that_hangs_or_crashes_harms_no_other_model(cards: Cards, who: str, how: str) -> None:
    cards.host.fault("build", how, who)
    tables = {
        "bad": {"path": cards.model, "devices": ["ascend:0"], "load_timeout": 5, "spares": 0},
        "good": {"path": cards.model, "sharing": "off", "devices": ["ascend:1"], "spares": 0},
    }
    with cards.services(tables) as service, service.client() as client:
        ask_all(client, "good", questions(cards.model))
        until(lambda: status(service, "bad").state == "failed", "the other one fails")
        cause = "took too long; its log ends: " if how == "hang" else "killed by SIGSEGV"
        until(lambda: cause in refusal(client, "bad", cards), "all that is known is told")
        assert "Ascend custom operator path not found" in refusal(client, "bad", cards), "the end of the native log"
        ask_all(client, "good", questions(cards.model))
        until(lambda: cards.host.ledger(0).allocations == (), "nothing is left on the card")


def test_a_worker_that_crashes_in_predict_costs_one_worker_and_no_answer(cards: Cards) -> None:
    with cards.ready() as (service, client):
        cards.host.fault("predict", "crash", "importer", times=1)
        ask_all(client, MODEL, questions(cards.model))
        until(lambda: len(roles(service)) == 4 and "killed by SIGSEGV" in service.log, "it is replaced")
        assert status(service).failed == 0


def test_what_does_not_fit_on_the_card_is_told_by_the_library(cards: Cards) -> None:
    cards.host.switch(capacity_mib=250)
    # Room that may come free is waited for, but no longer than this.
    with cards.service(load_timeout=5) as service, service.client() as client:
        assert "build_from_file failed!" in cause_of_failure(service, client, cards)


def test_the_limit_of_processes_is_known_before_anything_is_started(cards: Cards) -> None:
    with cards.service(workers=63) as service, service.client() as client:
        text = cause_of_failure(service, client, cards)
        assert text.endswith("ascend:0 takes at most 63 processes: mlp.1 needs 65 (holder, workers and spares)")
        assert cards.host.count("build") == 0


def test_a_model_may_take_the_place_of_another_one_on_a_full_card(cards: Cards) -> None:
    with cards.service(memory_mib=300, process_mib=50) as service, service.client() as client:
        service.ready()
        # It does not leave before it is ended.
        os.kill(process(service, "w1").pid, signal.SIGSTOP)
        text = service.config.read_text("utf-8")
        service.config.write_text(text.replace("[models.mlp]", "[models.renamed]"), "utf-8")
        client.reload()
        [question, *_] = questions(cards.model)
        assert_same(client.infer("renamed", question.inputs), question.answer)
        assert "renamed.1 waits for the room of mlp.1" in service.log
        assert service.log.index("mlp.1: gone") < service.log.index("renamed.1: spawned")


def test_off_ascend_it_says_so(cards: Cards) -> None:
    cards.host.switch(ascend=False)
    with cards.service() as service, service.client() as client:
        text = cause_of_failure(service, client, cards)
        assert "the library has no number for this process" in text
        assert "finds no Ascend driver" in text


def test_a_stopped_holder_does_not_stop_the_workers(cards: Cards) -> None:
    with cards.ready() as (service, client):
        pid = process(service, "holder").pid
        os.kill(pid, signal.SIGSTOP)
        try:
            ask_all(client, MODEL, questions(cards.model))
        finally:
            os.kill(pid, signal.SIGCONT)
