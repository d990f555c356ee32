"""What is lost on a card, under load: workers, spares, holders, files. No request is lost and no answer is wrong."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd import Unavailable

from ..support import Load, SampleRequest, ask_all
from .support import MODEL, Cards, a_host, kill, names, number, questions, serves, status, wait_for_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def right(cards: Cards) -> list[SampleRequest]:
    return questions(cards.model)


@pytest.fixture(scope="module")
def service(cards: Cards, right: list[SampleRequest]) -> Iterator[Service]:
    """On a card where what is left of a holder that has died is somebody else's memory."""
    cards.host.switch(lifetime="strict", after_death="garbage")
    with cards.ready() as service:
        yield service


@pytest.fixture
def load(cards: Cards, service: Service, right: list[SampleRequest]) -> Iterator[Load]:
    """Each test leaves the service complete, one copy of the weights on the card, and every request answered."""
    failed = status(service).failed
    with Load(service.address, MODEL, right) as load:
        load.wait_for(50)
        yield load
        cards.host.clear_faults()
        cards.host.switch(acl_set_pid="ok")
        load.wait_for(50)
    wait_for_all(service)
    assert status(service).failed == failed
    assert cards.host.copies_of_weights(0) == 1


def spare_after(service: Service, before: list[str]) -> None:
    """Wait until somebody is a spare who was not one before."""
    until(lambda: len(now := names(service, "spare")) == 1 and now != before, "a new spare is attached")


def test_a_spare_takes_a_lost_workers_place_and_a_new_one_is_let_in(cards: Cards, service: Service, load: Load) -> None:
    builds, generation, spare = cards.host.count("build"), number(service), names(service, "spare")
    kill(service, "worker")
    until(lambda: spare[0] in names(service, "worker"), "the spare works")
    load.wait_for(20)
    spare_after(service, spare)
    assert serves(service, generation)
    assert cards.host.count("build") == builds + 1


def test_a_worker_that_crashes_while_it_attaches_harms_nobody_and_another_is_let_in(
    cards: Cards, service: Service, load: Load
) -> None:
    """At its worst moment: it has written the weights that all compute with anew, and has memory on the card."""
    builds, generation, spare = cards.host.count("build"), number(service), names(service, "spare")
    cards.host.fault("build", "crash", "importer", times=1, at="loaded")
    kill(service, "worker")
    until(lambda: "killed by SIGSEGV" in service.log, "the one in its place crashes")
    spare_after(service, spare)
    assert serves(service, generation)
    assert cards.host.count("build") == builds + 2


def test_a_stopped_holder_does_not_stop_the_workers(service: Service, load: Load) -> None:
    [pid] = [each.pid for each in service.processes() if each.role == "holder"]
    os.kill(pid, signal.SIGSTOP)
    try:
        load.wait_for(50)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_file_may_be_replaced_at_any_time(cards: Cards, service: Service, load: Load) -> None:
    """Each attach writes the weights anew, from its own file: it must be the one that the holder had."""
    other, spare = cards.mlp("other", seed=9), names(service, "spare")
    assert other.stat().st_size == cards.model.stat().st_size
    shutil.copyfile(other, cards.model)
    kill(service, "worker")
    spare_after(service, spare)


def test_where_nobody_can_be_let_in_the_next_generation_comes(cards: Cards, service: Service, load: Load) -> None:
    generation = number(service)
    cards.host.switch(acl_set_pid="missing")
    kill(service, "worker")
    until(lambda: "no worker can attach any more" in status(service).generations[0].progress, "it is closed")
    load.wait_for(20)
    assert number(service) == generation, "the spare is enough"
    kill(service, "worker")
    until(lambda: serves(service, generation + 1), "the next generation serves alone")


def test_without_its_holder_a_generation_is_replaced_and_nobody_gets_what_it_computed(
    service: Service, load: Load
) -> None:
    generation = number(service)
    kill(service, "holder")
    until(lambda: serves(service, generation + 1), "the next generation serves alone")


def test_a_generation_that_cannot_be_replaced_is_tried_for_again_and_who_waits_is_told_why(
    cards: Cards, service: Service, right: list[SampleRequest]
) -> None:
    generation = number(service)
    cards.host.fault("build", "fail", "holder")
    kill(service, "holder")
    until(lambda: f"mlp.{generation + 2} " in service.log, "it has been tried twice")
    with service.client() as client:
        with pytest.raises(Unavailable, match=r"mlp has no worker: .*build_from_file failed!"):
            client.infer(MODEL, right[0].inputs, timeout=1)
        cards.host.clear_faults()
        ask_all(client, MODEL, right)
    wait_for_all(service)


def test_a_snapshot_that_was_tampered_with_is_not_loaded(
    cards: Cards, service: Service, right: list[SampleRequest]
) -> None:
    """The last one: nobody can attach to this generation any more."""
    [snapshot] = Path(service.cache).rglob("model/*.mindir")
    snapshot.chmod(0o600)
    shutil.copyfile(cards.mlp("other", seed=9), snapshot)
    with Load(service.address, MODEL, right) as load:
        kill(service, "worker")
        until(lambda: "expected a model with sha256" in service.log, "the replacement is refused")
        load.wait_for(50)


@pytest.mark.long
def test_where_the_driver_counts_references_workers_go_on_until_the_next_generation_serves(tmp_path: Path) -> None:
    cards = a_host(tmp_path)
    with cards.ready(holder_loss="frozen", workers=1, spares=0) as service:
        cards.host.fault("build", "slow", "holder", seconds=1.0)
        with Load(service.address, MODEL, questions(cards.model)) as load:
            load.wait_for(50)
            kill(service, "holder")
            until(lambda: "frozen" in status(service).generations[0].progress, "it is frozen")
            load.wait_for(50)
            until(lambda: serves(service, 2), "the second generation serves alone")
            load.wait_for(50)
        assert status(service).failed == 0
        assert service.log.index("mlp.2 takes over from mlp.1") < service.log.index("mlp.1: gone")


def test_a_build_that_crashes_harms_no_other_model(tmp_path: Path) -> None:
    cards = a_host(tmp_path)
    cards.host.fault("build", "crash", "holder")
    table = {"path": cards.model, "spares": 0, "workers": 1}
    tables = {"bad": {**table, "devices": ["ascend:0"]}, "good": {**table, "sharing": "off", "devices": ["ascend:1"]}}
    with cards.service(tables) as service, service.client() as client:
        ask_all(client, "good", questions(cards.model))
        until(lambda: status(service, "bad").state == "failed", "the other one fails")
        [cause] = until(
            lambda: [line for line in service.log.splitlines() if "bad.1 failed: bad.1.holder: " in line],
            "the log says why",
        )
        assert "killed by SIGSEGV" in cause
        assert "Ascend custom operator path not found" in cause, "the end of the native log"
        ask_all(client, "good", questions(cards.model))
        until(lambda: cards.host.card_state(0).allocations == (), "nothing is left on the card")
