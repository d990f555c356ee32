"""A model in slices for ranks on simulated cards, which mix up the data of unsynchronized ranks without an error."""

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

MODEL = "mlp"  # the default model name in `support`
RANKS = 2


@dataclass
class SlicedModel:
    """A sliced model and the host that has the cards."""

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
        """Path of the self-test input with its known answer."""
        path = self.directory / "selftest.npz"
        if not path.exists():
            x = rows(3, seed=99)
            np.savez(path, x=x, output_0=self.slices.answers(x)[-1])
        return path

    def service(self, **more: object) -> Service:
        return Service({MODEL: self.table(**more)}, env=environment(self.host))

    def questions(self) -> list[SampleRequest]:
        """Return requests of several sizes with the answers of synchronized ranks."""
        asked = [rows(count, seed=count) for count in (1, 4, 2, 7)]
        return [SampleRequest({"x": x}, {"output_0": self.slices.answers(x)[-1]}) for x in asked]


def pattern(slices: Slices) -> str:
    """Return the path pattern of all slices, as in the configuration."""
    return str(slices.paths[0].with_name("rank{rank}.mindir"))


def rows(count: int, seed: int) -> Any:
    """Return small integers, for which the sliced model gives exactly the answers of the unsliced one."""
    return np.random.default_rng(seed).integers(-3, 4, (count, 16)).astype(np.float32)


@pytest.fixture
def cut(tmp_path: Path) -> SlicedModel:
    return SlicedModel(tmp_path, Host(tmp_path / "host", cards=4), ranks.mlp(tmp_path / "slices", RANKS))


@pytest.fixture
def service(cut: SlicedModel) -> Iterator[Service]:
    with cut.service() as service:
        service.ready()
        yield service


def test_replaces_rank_group_of_killed_rank(cut: SlicedModel, service: Service) -> None:
    with service.client() as client:
        ask_all(client, MODEL, cut.questions())
        first = {each.name: each for each in service.processes()}
        assert [(each.role, each.device) for each in first.values()] == [("rank", "ascend:0"), ("rank", "ascend:1")]
        assert len({each.sha256 for each in first.values()}) == RANKS
        os.kill(first[f"{MODEL}.1.rank0"].pid, signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
        until(lambda: serves(service, 2), "only the second generation serves")
        assert f"{MODEL}.1 failed: {MODEL}.1.rank0: killed by SIGKILL" in service.log
        assert status(service).unexpected_exits == 1


# Faults of rank 1 in a predict, and patterns of their log messages. A rank that skips the collective answers at once,
# but the other rank waits for it, and an answer of one rank alone does not count.
FAULTS = {
    "fail": r"mlp\.\d+\.rank1: a predict failed: ",
    "crash": r"mlp\.\d+\.rank1: killed by SIGSEGV",
    "hang": r"a predict took longer than predict_timeout \(1 s\)",
    "skip": r"a predict took longer than predict_timeout \(1 s\)",
    "slow": "",
}


def test_answers_are_right_despite_faults_of_one_rank(cut: SlicedModel) -> None:
    number = 1
    with cut.service(predict_timeout=1.0) as service, service.client() as client:
        service.ready()
        for action, logged in FAULTS.items():
            cut.host.fault("predict", action, rank=1, times=1, seconds=0.05)
            seen = len(service.log)
            ask_all(client, MODEL, cut.questions())
            number += bool(logged)
            until(partial(serves, service, number), f"{action}: generation {number} serves")
            assert re.search(logged, service.log[seen:]), action
        assert status(service).failed == 0


@pytest.mark.long
def test_library_times_out_before_weightd(cut: SlicedModel) -> None:
    with cut.service() as service, service.client() as client:
        service.ready()
        cut.host.switch(hccl_second=0.005)
        cut.host.fault("predict", "hang", rank=0, times=1)
        ask_all(client, MODEL, cut.questions())
        assert f"{MODEL}.1 failed: {MODEL}.1.rank1: a predict failed: " in service.log
        assert "EI0002" in service.log


@pytest.mark.long
def test_replaces_group_whose_ranks_do_not_connect_in_time(cut: SlicedModel) -> None:
    cut.host.switch(hccl_second=0.005)
    cut.host.fault("predict", "hang", rank=1, times=1)
    with cut.service() as service, service.client() as client:
        ask_all(client, MODEL, cut.questions())
        assert "EI0006" in service.log
        assert serves(service, 2)


@pytest.mark.parametrize(
    ("operation", "action", "cause"), [("predict", "garbage", "self-test"), ("build", "table", "EI0005")]
)
def test_rank_with_wrong_answers_never_serves(cut: SlicedModel, operation: str, action: str, cause: str) -> None:
    cut.host.fault(operation, action, rank=1)
    with cut.service() as service:
        until(lambda: status(service).state == "failed", "the model fails")
        assert cause in status(service).generations[-1].reason


@pytest.mark.long
def test_waits_for_port_of_killed_rank(cut: SlicedModel, service: Service) -> None:
    cut.host.switch(port_linger=1.0)
    with service.client() as client:
        os.kill(next(each.pid for each in service.processes()), signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
    assert "EI0019" in service.log


@pytest.mark.long
def test_four_ranks_on_four_cards(cut: SlicedModel, tmp_path: Path) -> None:
    four = SlicedModel(tmp_path / "four", cut.host, ranks.mlp(tmp_path / "four" / "slices", 4))
    cards = [f"ascend:{card}" for card in range(4)]
    with four.service(ranks={"devices": cards}) as service, service.client() as client:
        ask_all(client, MODEL, four.questions())
        assert [each.device for each in service.processes()] == cards


def test_self_test_rejects_wrong_slice(cut: SlicedModel, tmp_path: Path) -> None:
    """All ranks agree on the wrong answer."""
    wrong = ranks.mlp(tmp_path / "wrong", RANKS, seed=1)
    wrong.paths[0].write_bytes(cut.slices.paths[0].read_bytes())
    with cut.service(path=pattern(wrong)) as service:
        until(lambda: status(service).state == "failed", "the model fails")
        assert "self-test" in status(service).generations[-1].reason


def test_update_and_rollback_of_rank_group(cut: SlicedModel, service: Service, tmp_path: Path) -> None:
    """Requests are queued meanwhile, because a card runs one group. The self-test rejects other weights."""
    same = ranks.mlp(tmp_path / "same", RANKS)
    other = ranks.mlp(tmp_path / "other", RANKS, seed=5)
    with service.client() as client, Load(service.address, MODEL, cut.questions()) as load:
        load.wait_for(20)
        updated = client.update(MODEL, path=pattern(same))
        assert updated.generations == (2,)
        load.wait_for(20)
        with pytest.raises(FailedPrecondition, match="self-test"):
            client.update(MODEL, path=pattern(other))
        load.wait_for(20)
        until(lambda: serves(service, 4), "the previous files serve again")
        client.update(MODEL, rollback=True)
        until(lambda: serves(service, 5), "the initial files serve")
        load.wait_for(20)


@pytest.mark.long
def test_two_rank_groups_serve(cut: SlicedModel) -> None:
    cards = [["ascend:0", "ascend:1"], ["ascend:2", "ascend:3"]]
    with cut.service(ranks={"devices": cards}) as service, service.client() as client:
        until(lambda: [each.progress for each in status(service).generations] == ["serving"] * 2, "both groups serve")
        with Load(service.address, MODEL, cut.questions(), clients=4) as load:
            load.wait_for(50)
            os.kill(next(each.pid for each in service.processes() if each.name == "mlp.2.rank1"), signal.SIGKILL)
            load.wait_for(50)
            until(
                lambda: [each.number for each in status(service).generations] == [1, 3], "the second group is replaced"
            )
            load.wait_for(50)
        ask_all(client, MODEL, cut.questions())


def test_rank_group_survives_restart_of_daemon(cut: SlicedModel) -> None:
    with ManagedService({MODEL: cut.table()}, env=environment(cut.host)) as service, service.client() as client:
        service.ready()
        ask_all(client, MODEL, cut.questions())
        before = {each.name: each.pid for each in service.processes()}
        service.restart(signal.SIGKILL)
        ask_all(client, MODEL, cut.questions())
        assert {each.name: each.pid for each in service.processes()} == before
        assert status(service).generations[-1].number == 1
