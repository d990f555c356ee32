"""A model that is cut over ranks, on simulated cards: what arrives is mixed as on real ones, without an error."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import Host, environment, ranks
from ascendsim.ranks import Slices
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd import FailedPrecondition

from ..support import Load, SampleRequest, ask_all
from .support import serves, status

pytestmark = pytest.mark.e2e

MODEL = "mlp"  # of `support`
RANKS = 2


@dataclass
class Cut:
    """A model that is cut, and the host that has the cards."""

    directory: Path
    host: Host
    slices: Slices

    def table(self, **more: object) -> dict[str, object]:
        """Return the table of the model, on two cards."""
        path = pattern(self.slices)
        cards = [f"ascend:{card}" for card in range(RANKS)]
        table = {"path": path, "python": sys.executable, "selftest": str(self.selftest_path)}
        return {**table, "ranks": {"devices": cards}, **more}

    @property
    def selftest_path(self) -> Path:
        """The question whose right answer is known."""
        path = self.directory / "selftest.npz"
        if not path.exists():
            x = rows(3, seed=99)
            np.savez(path, x=x, output_0=self.slices.answers(x)[-1])
        return path

    def service(self, **more: object) -> Service:
        """Serve it."""
        return Service({MODEL: self.table(**more)}, env=environment(self.host))

    def questions(self) -> list[SampleRequest]:
        """Requests of several sizes, and what ranks answer that are in step."""
        asked = [rows(count, seed=count) for count in (1, 4, 2, 7)]
        return [SampleRequest({"x": x}, {"output_0": self.slices.answers(x)[-1]}) for x in asked]


def pattern(slices: Slices) -> str:
    """Return the paths of all slices, as the configuration has them."""
    return str(slices.paths[0].with_name("rank{rank}.mindir"))


def rows(count: int, seed: int) -> Any:
    """Small whole numbers: of these the cut makes the same bits as the whole."""
    return np.random.default_rng(seed).integers(-3, 4, (count, 16)).astype(np.float32)


@pytest.fixture
def cut(tmp_path: Path) -> Cut:
    return Cut(tmp_path, Host(tmp_path / "host", cards=4), ranks.mlp(tmp_path / "slices", RANKS))


@pytest.fixture
def service(cut: Cut) -> Iterator[Service]:
    with cut.service() as service:
        service.ready()
        yield service


def test_ranks_answer_and_those_that_have_lost_one_are_replaced(cut: Cut, service: Service) -> None:
    with service.client() as client:
        ask_all(client, MODEL, cut.questions())
        first = {each.name: each for each in service.processes()}
        assert [(each.role, each.device) for each in first.values()] == [("rank", "ascend:0"), ("rank", "ascend:1")]
        assert len({each.sha256 for each in first.values()}) == RANKS
        os.kill(first[f"{MODEL}.1.rank0"].pid, signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
        until(lambda: serves(service, 2), "all that is left serves")
        assert f"{MODEL}.1 failed: {MODEL}.1.rank0: killed by SIGKILL" in service.log
        assert status(service).unexpected_exits == 1


# What goes wrong with rank 1 in a predict, and what is told of it. A rank that left out the collective answers at once,
# and nobody sees that: the other one waits for it, and what only one says is no answer.
FAULTS = {
    "fail": r"mlp\.\d+\.rank1: a predict failed: ",
    "crash": r"mlp\.\d+\.rank1: killed by SIGSEGV",
    "hang": r"a predict took longer than predict_timeout \(1 s\)",
    "skip": r"a predict took longer than predict_timeout \(1 s\)",
    "slow": "",
}


def test_whatever_goes_wrong_in_one_rank_each_answer_is_right(cut: Cut) -> None:
    number = 1
    with cut.service(predict_timeout=1.0) as service, service.client() as client:
        service.ready()
        for action, told in FAULTS.items():
            cut.host.fault("predict", action, rank=1, times=1, seconds=0.05)
            seen = len(service.log)
            ask_all(client, MODEL, cut.questions())
            number += bool(told)
            until(partial(serves, service, number), f"{action}: generation {number} serves")
            assert re.search(told, service.log[seen:]), action
        assert status(service).failed == 0


@pytest.mark.long
def test_who_waits_in_vain_for_a_rank_ends_by_the_librarys_time_out_before_weightds(cut: Cut) -> None:
    with cut.service() as service, service.client() as client:
        service.ready()
        cut.host.switch(hccl_second=0.005)
        cut.host.fault("predict", "hang", rank=0, times=1)
        ask_all(client, MODEL, cut.questions())
        assert f"{MODEL}.1 failed: {MODEL}.1.rank1: a predict failed: " in service.log
        assert "EI0002" in service.log


@pytest.mark.long
def test_a_group_that_has_not_met_in_time_is_followed_by_another_one(cut: Cut) -> None:
    cut.host.switch(hccl_second=0.005)
    cut.host.fault("predict", "hang", rank=1, times=1)
    with cut.service() as service, service.client() as client:
        ask_all(client, MODEL, cut.questions())
        assert "EI0006" in service.log
        assert serves(service, 2)


@pytest.mark.parametrize(
    ("operation", "action", "cause"), [("predict", "garbage", "self-test"), ("build", "table", "EI0005")]
)
def test_a_rank_that_computes_something_else_never_serves(cut: Cut, operation: str, action: str, cause: str) -> None:
    cut.host.fault(operation, action, rank=1)
    with cut.service() as service:
        until(lambda: status(service).state == "failed", "it is refused")
        assert cause in status(service).generations[-1].reason


@pytest.mark.long
def test_a_port_that_comes_free_late_is_waited_for(cut: Cut, service: Service) -> None:
    cut.host.switch(port_linger=1.0)
    with service.client() as client:
        os.kill(next(each.pid for each in service.processes()), signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
    assert "EI0019" in service.log


@pytest.mark.long
def test_four_ranks_on_four_cards(cut: Cut, tmp_path: Path) -> None:
    four = Cut(tmp_path / "four", cut.host, ranks.mlp(tmp_path / "four" / "slices", 4))
    cards = [f"ascend:{card}" for card in range(4)]
    with four.service(ranks={"devices": cards}) as service, service.client() as client:
        ask_all(client, MODEL, four.questions())
        assert [each.device for each in service.processes()] == cards


def test_a_wrong_slice_is_found_by_the_selftest(cut: Cut, tmp_path: Path) -> None:
    """All ranks agree on its answer."""
    wrong = ranks.mlp(tmp_path / "wrong", RANKS, seed=1)
    wrong.paths[0].write_bytes(cut.slices.paths[0].read_bytes())
    with cut.service(path=pattern(wrong)) as service:
        until(lambda: status(service).state == "failed", "it is refused")
        assert "self-test" in status(service).generations[-1].reason


def test_an_update_takes_the_place_of_the_group_and_can_be_gone_back_from(
    cut: Cut, service: Service, tmp_path: Path
) -> None:
    """Requests wait meanwhile: a card has one group. The self-test is the same, so other weights are refused by it."""
    same = ranks.mlp(tmp_path / "same", RANKS)
    other = ranks.mlp(tmp_path / "other", RANKS, seed=5)
    with service.client() as client, Load(service.address, MODEL, cut.questions()) as load:
        load.wait_for(20)
        told = client.update(MODEL, path=pattern(same))
        assert told.generations == (2,)
        load.wait_for(20)
        with pytest.raises(FailedPrecondition, match="self-test"):
            client.update(MODEL, path=pattern(other))
        load.wait_for(20)
        until(lambda: serves(service, 4), "what served before serves again")
        client.update(MODEL, rollback=True)
        until(lambda: serves(service, 5), "the file of the start serves")
        load.wait_for(20)


@pytest.mark.long
def test_two_groups_serve_side_by_side(cut: Cut) -> None:
    cards = [["ascend:0", "ascend:1"], ["ascend:2", "ascend:3"]]
    with cut.service(ranks={"devices": cards}) as service, service.client() as client:
        until(lambda: [each.progress for each in status(service).generations] == ["serving"] * 2, "both serve")
        with Load(service.address, MODEL, cut.questions(), clients=4) as load:
            load.wait_for(50)
            os.kill(next(each.pid for each in service.processes() if each.name == "mlp.2.rank1"), signal.SIGKILL)
            load.wait_for(50)
            until(lambda: [each.number for each in status(service).generations] == [1, 3], "one is replaced")
            load.wait_for(50)
        ask_all(client, MODEL, cut.questions())


def test_a_group_survives_the_end_of_the_daemon(cut: Cut) -> None:
    with ManagedService({MODEL: cut.table()}, env=environment(cut.host)) as service, service.client() as client:
        service.ready()
        ask_all(client, MODEL, cut.questions())
        before = {each.name: each.pid for each in service.processes()}
        service.restart(signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
        assert {each.name: each.pid for each in service.processes()} == before
        assert status(service).generations[-1].number == 1
