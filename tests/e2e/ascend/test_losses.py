"""Workers, spares and holders that die on a card, under load: no request is lost and no answer is wrong."""

from __future__ import annotations

import functools

import pytest

from testkit.waiting import until
from weightd.client import Unavailable

from ..support import Load, ask_all
from .support import Cards, generation, kill, process, questions, roles, serves, status

pytestmark = pytest.mark.e2e


def test_a_spare_takes_a_lost_workers_place_and_a_new_one_is_let_in(cards: Cards) -> None:
    with cards.ready() as (service, _):
        builds = cards.host.count("build")
        with Load(service.address, "mlp", questions(cards.model)) as load:
            load.wait_for(50)
            kill(service, "w1")
            until(lambda: roles(service).get("w3") == "worker", "the spare works")
            load.wait_for(50)
            until(lambda: roles(service).get("w4") == "spare", "a new spare is attached")
            load.wait_for(50)
        assert serves(service, 1)
        assert (status(service).failed, cards.host.count("build")) == (0, builds + 1)
        assert cards.host.copies_of_weights(0) == 1


def test_no_request_waits_for_a_build_while_there_is_a_spare(cards: Cards) -> None:
    with cards.ready() as (service, client):
        cards.host.fault("build", "hang")
        kill(service, "w1")
        until(lambda: roles(service).get("w3") == "worker", "the spare works")
        ask_all(client, "mlp", questions(cards.model))
        until(lambda: process(service, "w4").state == "attaching", "the replacement attaches, for ever")
        ask_all(client, "mlp", questions(cards.model))


@pytest.mark.parametrize(("policy", "how"), [("auto", "missing"), ("overlap", "unsupported"), ("replace", "missing")])
def test_where_nobody_can_be_let_in_the_next_generation_comes(cards: Cards, policy: str, how: str) -> None:
    with cards.ready(policy=policy) as (service, _):
        cards.host.switch(acl_set_pid=how)
        with Load(service.address, "mlp", questions(cards.model)) as load:
            load.wait_for(50)
            kill(service, "w1")
            until(lambda: "nobody can attach any more" in status(service).generations[0].progress, "it is closed")
            load.wait_for(50)
            assert generation(service, 2) is None, "the spare is enough"
            if how == "unsupported":
                # The build calls it too.
                cards.host.switch(acl_set_pid="ok")
            kill(service, "w2")
            until(lambda: serves(service, 2), "the second generation serves alone")
            load.wait_for(50)
        assert status(service).failed == 0
        assert cards.host.copies_of_weights(0) == 1
        order = [service.log.index(text) for text in ("mlp.1: gone", "mlp.2: building")]
        assert (order == sorted(order)) == (policy == "replace"), service.log


def test_without_room_for_two_copies_the_old_generation_leaves_first(cards: Cards) -> None:
    with cards.ready(memory_mib=1000, process_mib=220) as (service, client):
        cards.host.switch(acl_set_pid="missing")
        for name in ("w1", "w2"):
            kill(service, name)
        until(lambda: serves(service, 2), "the second generation serves alone")
        ask_all(client, "mlp", questions(cards.model))
        assert service.log.index("mlp.1: gone") < service.log.index("mlp.2: building")
        assert "mlp.1 leaves before mlp.2 is loaded: ascend:0 has no room" in service.log


@pytest.mark.parametrize("after_death", ["error", "garbage"])
def test_without_its_holder_a_generation_is_replaced_and_nobody_gets_what_it_computed(
    cards: Cards, after_death: str
) -> None:
    cards.host.switch(lifetime="strict", after_death=after_death)
    with cards.ready() as (service, _):
        with Load(service.address, "mlp", questions(cards.model), clients=3) as load:
            for number in (2, 3):
                load.wait_for(50)
                kill(service, "holder")
                until(functools.partial(serves, service, number), "the next generation serves alone")
            load.wait_for(50)
        assert status(service).failed == 0
        assert cards.host.copies_of_weights(0) == 1


def test_while_nothing_serves_a_request_is_unavailable_by_its_deadline(cards: Cards) -> None:
    with cards.ready() as (service, client):
        cards.host.fault("build", "hang", "holder")
        kill(service, "holder")
        until(lambda: status(service).state == "building", "its death is known, and the next one builds")
        [question, *_] = questions(cards.model)
        with pytest.raises(Unavailable, match=r"mlp has no worker: building"):
            client.infer("mlp", question.inputs, timeout=3)
        service.stop(limit=1)


def test_where_the_driver_counts_references_workers_go_on_until_the_next_generation_serves(cards: Cards) -> None:
    cards.host.switch(lifetime="counted")
    with cards.ready(holder_loss="frozen") as (service, client):
        cards.host.fault("build", "slow", "holder", seconds=1.0)
        with Load(service.address, "mlp", questions(cards.model)) as load:
            load.wait_for(50)
            kill(service, "holder")
            until(lambda: "frozen" in status(service).generations[0].progress, "it is frozen")
            load.wait_for(50)
            until(lambda: serves(service, 2), "the second generation serves alone")
            load.wait_for(50)
        assert status(service).failed == 0
        ask_all(client, "mlp", questions(cards.model))
        assert service.log.index("mlp.2 takes over from mlp.1") < service.log.index("mlp.1: gone")


def test_a_generation_that_cannot_be_replaced_is_tried_for_again_and_who_waits_is_told_why(
    cards: Cards,
) -> None:
    with cards.ready() as (service, client):
        cards.host.fault("build", "fail", "holder")
        kill(service, "holder")
        until(lambda: "mlp.4 " in service.log, "it has been tried three times")
        [question, *_] = questions(cards.model)
        with pytest.raises(Unavailable, match=r"mlp has no worker: .*build_from_file failed!"):
            client.infer("mlp", question.inputs, timeout=5)
        cards.host.clear_faults()
        ask_all(client, "mlp", questions(cards.model))
        assert service.stop() == 2
