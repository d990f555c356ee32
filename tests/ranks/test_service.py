"""Ranks of the real MindSpore with a real daemon: right answers despite the loss of a rank or of the broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from testkit.managed import ManagedService
from testkit.ranks import Group, Slices, export, inputs
from testkit.service import Service
from testkit.waiting import until
from weightd import Client, FailedPrecondition
from weightd_protocol.messages.status import GenerationStatus

from ..e2e.support import Load, SampleRequest, ask_all

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(240)]

MODEL = "cut"
SIZES = (1, 4, 2, 7, 3)
START_S = 120.0
# Shortly after the daemon's limit, the library gives up waiting for a stopped rank or broker.
RANKS = {"size": 2, "exec_timeout": 6}
PREDICT_TIMEOUT_S = 5.0


def table(python: Path, slices: Slices, **more: object) -> dict[str, object]:
    """Return the table of the model, with two ranks on the CPU."""
    own = {"path": slices.pattern, "engine": "mindspore", "python": python}
    return {
        **own,
        "selftest": slices.selftest_path,
        "selftest_tolerance": 1e-5,
        "ranks": RANKS,
        "predict_timeout": PREDICT_TIMEOUT_S,
        **more,
    }


@pytest.fixture(scope="module")
def questions(slices: Slices) -> list[SampleRequest]:
    """Requests of several sizes, with the answers of the same group without weightd."""
    asked = [inputs(rows, seed=rows) for rows in SIZES]
    with Group(slices.paths, plain=True) as bare:
        return [SampleRequest(each, bare.ask("predict", each)[-1]) for each in asked]


@pytest.fixture(scope="module")
def service(python: Path, slices: Slices) -> Iterator[ManagedService]:
    with ManagedService({MODEL: table(python, slices)}) as service:
        service.ready(START_S)
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def serving(service: Service) -> GenerationStatus:
    """Return the serving generation."""
    [model] = service.status().models
    return next(each for each in model.generations if each.state == "serving")


def test_answers_equal_group_without_weightd(client: Client, questions: Sequence[SampleRequest]) -> None:
    ask_all(client, MODEL, [*questions] * 3)


def test_status_lists_ranks_and_broker(service: Service) -> None:
    there = {each.role: each for each in service.processes()}
    assert {*there} == {"rank", "broker"}
    ranks = [each for each in service.processes() if each.role == "rank"]
    assert [each.name.rpartition(".")[2] for each in ranks] == ["rank0", "rank1"]


def test_group_survives_restart_of_daemon(service: ManagedService, questions: Sequence[SampleRequest]) -> None:
    before = serving(service)
    pids = {each.pid for each in before.processes}
    with service.client() as client:
        ask_all(client, MODEL, questions)
    assert service.restart(signal.SIGTERM) == 0
    with service.client() as client:
        ask_all(client, MODEL, questions)
    after = serving(service)
    assert (after.number, {each.pid for each in after.processes}) == (before.number, pids)


@pytest.mark.parametrize(
    ("process", "number"), [("rank0", signal.SIGKILL), ("rank1", signal.SIGSTOP), ("broker", signal.SIGKILL)]
)
def test_lost_process_replaces_group_without_lost_request(
    service: Service, questions: Sequence[SampleRequest], process: str, number: signal.Signals
) -> None:
    before = serving(service)
    victim = next(each for each in before.processes if each.name.endswith(f".{process}"))
    with Load(service.address, MODEL, questions) as load:
        load.wait_for(20)
        os.kill(victim.pid, number)
        until(lambda: serving_after(service, before.number), "another group serves", START_S)
        load.wait_for(20)
    # All processes of the group have exited, not only the one that was killed or stopped.
    assert not [each.pid for each in before.processes if Path(f"/proc/{each.pid}").exists()]
    if number is signal.SIGKILL:
        # Otherwise another rank may have failed first.
        assert f"{MODEL}.{before.number} failed: {victim.name}: " in service.log


def serving_after(service: Service, number: int) -> bool:
    """Return whether a generation with a higher number serves."""
    [model] = service.status().models
    return any(each.state == "serving" and each.number > number for each in model.generations)


def test_self_test_rejects_slice_of_other_network(python: Path, slices: Slices, tmp_path: Path) -> None:
    """The slice loads and has the same signature, and both ranks agree, so only the self-test detects it."""
    other = export(tmp_path / "other", hidden=128)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "rank0.mindir").write_bytes(slices.paths[0].read_bytes())
    (mixed / "rank1.mindir").write_bytes(other.paths[1].read_bytes())
    wrong = table(python, slices, path=mixed / "rank{rank}.mindir")
    with (
        Service({MODEL: wrong}) as service,
        service.client(START_S) as client,
        pytest.raises(FailedPrecondition, match=r"self-test"),
    ):
        client.infer(MODEL, inputs(1))


def test_two_groups_share_queue(python: Path, slices: Slices, questions: Sequence[SampleRequest]) -> None:
    groups = [["cpu", "cpu"], ["cpu", "cpu"]]
    with Service({MODEL: table(python, slices, ranks={"devices": groups})}) as service:
        service.ready(START_S)

        def both_have_served() -> bool:
            with service.client() as client:
                ask_all(client, MODEL, questions)
            return all(each.served for each in service.processes() if each.role == "rank")

        until(both_have_served, "both groups have served")
        for each in service.processes():
            assert each.role in ("rank", "broker")
