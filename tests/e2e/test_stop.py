"""A clean stop: what was accepted is answered, and no process and no file is left."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from testkit.waiting import until
from weightd.client import Client, Pending, RequestError, Unavailable

from .support import (
    ONE_ENGINE,
    Bare,
    Place,
    Question,
    Watched,
    Weightd,
    assert_same,
    children_of,
    mlp_inputs,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def question(mlp: Path, bare: Bare) -> Question:
    """One that keeps a worker busy for some milliseconds."""
    return bare.questions(mlp, mlp_inputs((256,)))[0]


@pytest.fixture
def config(mlp: Path, place: Place) -> Path:
    return place.config({"mlp": {"path": mlp, "workers": WORKERS}})


@pytest.fixture
def daemon(config: Path, tmp_path: Path) -> Iterator[Weightd]:
    """In a session of its own, as in a terminal of its own."""
    with Weightd(tmp_path / "weightd.log", "--verbose", "serve", config, session=True) as daemon:
        yield daemon


def submit(client: Client, question: Question, count: int) -> Sequence[Pending]:
    """Submit so many requests; they have been accepted on return."""
    pending = [client.submit("mlp", question.inputs) for _ in range(count)]
    client.status()
    return pending


def to_process(pid: int, number: int) -> None:
    os.kill(pid, number)


def to_group(pid: int, number: int) -> None:
    """As a terminal does on Ctrl-C."""
    os.killpg(pid, number)


def _exactly(count: int, pids: set[int]) -> set[int]:
    return pids if len(pids) == count else set()


@pytest.mark.parametrize(("number", "to"), [(signal.SIGTERM, to_process), (signal.SIGINT, to_group)])
def test_a_stop_answers_what_was_accepted_and_leaves_nothing(
    number: int, to: Callable[[int, int], None], daemon: Weightd, question: Question, place: Place
) -> None:
    with daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        # A library that loads may call another program: for a moment there is one process more.
        children = until(lambda: _exactly(WORKERS + 1, children_of(place.cache)), "all are there")
        with Watched(children) as watched:
            pending = submit(client, question, 40)
            to(daemon.pid, number)
            daemon.wait_for("stopping: finishing what was accepted")
            # On a busy host it has finished, and gone, before this one asks.
            with pytest.raises(Unavailable, match=r"stopping|no daemon"):
                client.infer("mlp", question.inputs)
            for each in pending:
                assert_same(each.result(), question.answer)
            assert daemon.wait() == 0
            assert watched.survivors() == []
    assert place.left == []
    assert_workers_left_before_the_holder(daemon.log)


def assert_workers_left_before_the_holder(log: str) -> None:
    steps = re.findall(r"mlp\.1\.(\w+): (\w+) -> (\w+)", log)
    holder_stops = steps.index(("holder", "holding", "stopping"))
    gone = [index for index, (_, _, state) in enumerate(steps) if state == "gone"]
    assert [steps[index][0] for index in gone[-1:]] == ["holder"]
    assert len(gone) == WORKERS + 1
    assert all(index < holder_stops for index in gone[:-1]), steps


@pytest.mark.parametrize("moment", ["pinning", "building", "attaching"])
def test_a_stop_while_a_model_loads_leaves_nothing(moment: str, daemon: Weightd, place: Place) -> None:
    daemon.wait_for(f"mlp.1: {moment}")
    with Watched(children_of(place.cache)) as watched:
        assert daemon.end() == 0
        assert watched.survivors() == []
    assert children_of(place.cache) == set()
    assert place.left == []


def test_a_second_signal_kills_at_once(daemon: Weightd, question: Question, place: Place) -> None:
    with daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        until(lambda: "mlp.1: serving" in daemon.log, "every worker is READY")
        with Watched(children_of(place.cache)) as watched:
            pending = submit(client, question, 500)
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait_for("stopping")
            os.kill(daemon.pid, signal.SIGTERM)
            daemon.wait(5)
            assert watched.survivors() == []
        assert f"w{WORKERS + 1}" not in daemon.log, "no worker is replaced"
        assert children_of(place.cache) == set()
        assert place.left == []
        endings = {ending_of(each, question) for each in pending}
    assert "UNAVAILABLE" in endings
    assert endings <= {"right", "UNAVAILABLE"}


def ending_of(pending: Pending, question: Question) -> str:
    try:
        assert_same(pending.result(), question.answer)
    except RequestError as error:
        return error.code
    return "right"


def test_requests_that_take_longer_than_the_drain_are_refused_and_the_stop_goes_on(
    mlp: Path, place: Place, question: Question
) -> None:
    tables = {"mlp": {"path": mlp}}
    with place.serve(tables, drain_timeout=0.2) as daemon, daemon.client(place.address) as client:
        assert_same(client.infer("mlp", question.inputs), question.answer)
        pending = submit(client, question, 500)
        os.kill(daemon.pid, signal.SIGTERM)
        assert {ending_of(each, question) for each in pending} == {"right", "UNAVAILABLE"}
        assert daemon.wait() == 0
    assert place.left == []
