"""Loss of workers, spares, holders and files on a simulated card, while clients send requests."""

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
from weightd_protocol.messages.channels import RequestLost

from ..channel_client import ChannelClient
from ..support import Load, SampleRequest, ask_all
from .support import MODEL, Cards, kill, make_host, names, number, questions, serves, status, wait_for_all

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def right(cards: Cards) -> list[SampleRequest]:
    return questions(cards.model)


@pytest.fixture(scope="module")
def service(cards: Cards, right: list[SampleRequest]) -> Iterator[Service]:
    """A service on a card that reuses the memory of a dead holder for other data."""
    cards.host.switch(lifetime="strict", after_death="garbage")
    with cards.ready() as service:
        yield service


@pytest.fixture
def load(cards: Cards, service: Service, right: list[SampleRequest]) -> Iterator[Load]:
    """Send requests during the test; check that it loses no request and leaves a complete service."""
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


def state_of(pid: int) -> str:
    """Return the state of a process as a letter; "Z": it has exited, but its parent does not know."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]


def log_of(pid: int) -> str:
    """Return the log of a child process."""
    return Path(f"/proc/{pid}/fd/2").readlink().read_text("utf-8")


def wait_for_new_spare(service: Service, before: list[str]) -> None:
    """Wait until another process is the spare."""
    until(lambda: len(now := names(service, "spare")) == 1 and now != before, "a new spare is attached")


def test_spare_replaces_killed_worker(cards: Cards, service: Service, load: Load) -> None:
    builds, generation, spare = cards.host.count("build"), number(service), names(service, "spare")
    kill(service, "worker")
    until(lambda: spare[0] in names(service, "worker"), "the spare has become a worker")
    load.wait_for(20)
    wait_for_new_spare(service, spare)
    assert serves(service, generation)
    assert cards.host.count("build") == builds + 1


def test_crash_during_attach_harms_no_other_worker(cards: Cards, service: Service, load: Load) -> None:
    """Crash at the worst moment: the worker has rewritten the shared weights and has memory on the card."""
    builds, generation, spare = cards.host.count("build"), number(service), names(service, "spare")
    cards.host.fault("build", "crash", "importer", times=1, at="loaded")
    kill(service, "worker")
    until(lambda: "killed by SIGSEGV" in service.log, "its replacement crashes")
    wait_for_new_spare(service, spare)
    assert serves(service, generation)
    assert cards.host.count("build") == builds + 2


def test_workers_serve_while_holder_is_stopped(service: Service, load: Load) -> None:
    [pid] = [each.pid for each in service.processes() if each.role == "holder"]
    os.kill(pid, signal.SIGSTOP)
    try:
        load.wait_for(50)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_model_file_may_be_replaced_at_any_time(cards: Cards, service: Service, load: Load) -> None:
    """Each attach rewrites the weights from a file; it must use the holder's file, not the replaced one."""
    other, spare = cards.mlp("other", seed=9), names(service, "spare")
    assert other.stat().st_size == cards.model.stat().st_size
    shutil.copyfile(other, cards.model)
    kill(service, "worker")
    wait_for_new_spare(service, spare)


def test_new_generation_if_workers_cannot_attach(cards: Cards, service: Service, load: Load) -> None:
    generation = number(service)
    cards.host.switch(acl_set_pid="missing")
    kill(service, "worker")
    until(
        lambda: "no worker can attach any more" in status(service).generations[0].progress,
        "the generation accepts no workers",
    )
    load.wait_for(20)
    assert number(service) == generation, "the spare is enough"
    kill(service, "worker")
    until(lambda: serves(service, generation + 1), "the next generation serves alone")


def test_replaces_generation_of_killed_holder(service: Service, load: Load) -> None:
    generation = number(service)
    kill(service, "holder")
    until(lambda: serves(service, generation + 1), "the next generation serves alone")


def test_worker_answers_on_no_channel_after_the_holder_died(service: Service, right: list[SampleRequest]) -> None:
    x, expected = right[0].inputs["x"], right[0].answer["y"].tolist()
    workers = [each.pid for each in service.processes() if each.role == "worker"]
    [holder] = [each.pid for each in service.processes() if each.role == "holder"]
    with ChannelClient(service.address, MODEL, x=x) as client:
        # While the daemon is stopped, only the worker can notice the exit of the holder.
        os.kill(service.pid, signal.SIGSTOP)
        try:
            assert client.output(client.send(x=x)) == expected
            os.kill(holder, signal.SIGKILL)
            until(lambda: state_of(holder) == "Z", "the holder has exited")
            name = client.send(x=x)
            until(lambda: any("weights have become invalid" in log_of(each) for each in workers), "no answer")
            assert not client.has_answer(name)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        assert client.wait_for(RequestLost).id == name
        assert client.output(client.relay(x=x)) == expected
    wait_for_all(service)


def test_retries_failed_replacement_and_reports_reason(
    cards: Cards, service: Service, right: list[SampleRequest]
) -> None:
    generation = number(service)
    cards.host.fault("build", "fail", "holder")
    kill(service, "holder")
    until(lambda: f"mlp.{generation + 2} " in service.log, "the daemon has tried twice")
    with service.client() as client:
        with pytest.raises(Unavailable, match=r"mlp has no worker: .*build_from_file failed!"):
            client.infer(MODEL, right[0].inputs, timeout=1)
        cards.host.clear_faults()
        ask_all(client, MODEL, right)
    wait_for_all(service)


def test_rejects_modified_snapshot(cards: Cards, service: Service, right: list[SampleRequest]) -> None:
    """Keep this test last: no worker can attach to this generation afterwards."""
    [snapshot] = Path(service.cache).rglob("model/*.mindir")
    snapshot.chmod(0o600)
    shutil.copyfile(cards.mlp("other", seed=9), snapshot)
    with Load(service.address, MODEL, right) as load:
        kill(service, "worker")
        until(lambda: "expected a model with sha256" in service.log, "the replacement is rejected")
        load.wait_for(50)


@pytest.mark.long
def test_frozen_generation_serves_until_it_is_replaced(tmp_path: Path) -> None:
    cards = make_host(tmp_path)
    with cards.ready(holder_loss="frozen", workers=1, spares=0) as service:
        cards.host.fault("build", "slow", "holder", seconds=1.0)
        with Load(service.address, MODEL, questions(cards.model)) as load:
            load.wait_for(50)
            kill(service, "holder")
            until(lambda: "frozen" in status(service).generations[0].progress, "the generation is frozen")
            load.wait_for(50)
            until(lambda: serves(service, 2), "the second generation serves alone")
            load.wait_for(50)
        assert status(service).failed == 0
        assert service.log.index("mlp.2 takes over from mlp.1") < service.log.index("mlp.1: gone")


def test_crashed_build_harms_no_other_model(tmp_path: Path) -> None:
    cards = make_host(tmp_path)
    cards.host.fault("build", "crash", "holder")
    table = {"path": cards.model, "spares": 0, "workers": 1}
    tables = {"bad": {**table, "devices": ["ascend:0"]}, "good": {**table, "sharing": "off", "devices": ["ascend:1"]}}
    with cards.service(tables) as service, service.client() as client:
        ask_all(client, "good", questions(cards.model))
        until(lambda: status(service, "bad").state == "failed", "the bad model fails")
        [cause] = until(
            lambda: [line for line in service.log.splitlines() if "bad.1 failed: bad.1.holder: " in line],
            "the log has the reason",
        )
        assert "killed by SIGSEGV" in cause
        assert "Ascend custom operator path not found" in cause, "the end of the native log"
        ask_all(client, "good", questions(cards.model))
        until(lambda: cards.host.card_state(0).allocations == (), "the memory of the card is free")
