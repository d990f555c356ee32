"""A rank of MindSpore Lite where it cannot be one. What it does in a group: `ranks/test_group.py`."""

from __future__ import annotations

import os
import sys
import types
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from weightd_worker.engines.engine import BuildError, EngineMissing
from weightd_worker.engines.mindspore_lite.ge_rank import MindSporeLiteRank
from weightd_worker.engines.ranks import RankRendezvous


def library(ascend: Any) -> types.ModuleType:
    module: Any = types.ModuleType("mindspore_lite")
    module.__version__ = "2.0.0"
    module.Context = lambda: SimpleNamespace(ascend=ascend)
    return module  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("device", "table", "problem"),
    [
        ("cpu", "/t.json", "device: ranks of mindspore_lite run on cards, expected ascend:N, got 'cpu'"),
        ("ascend:0", "", "ranks.table: expected the path of a rank table, got none"),
    ],
)
def test_what_it_cannot_do_without_is_told(device: str, table: str, problem: str) -> None:
    with pytest.raises(BuildError) as raised:
        MindSporeLiteRank(RankRendezvous(0, 2, device, rank_table=table))
    assert str(raised.value) == problem


def test_a_library_that_would_take_each_rank_for_the_first_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore_lite", library(SimpleNamespace(rank_id=0)))
    with pytest.raises(EngineMissing, match="does not support ranks; install"):
        MindSporeLiteRank(RankRendezvous(0, 2, "ascend:0", rank_table="/t.json"))


@pytest.mark.parametrize(("mib", "told"), [(64, "64"), (0, None)])
def test_what_hccl_reads_is_there_before_the_library(
    monkeypatch: pytest.MonkeyPatch, mib: int, told: Optional[str]
) -> None:
    names = ["HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE"]
    for name in names:
        # What is set is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mindspore_lite", None)
    with pytest.raises(EngineMissing):
        MindSporeLiteRank(RankRendezvous(0, 2, "ascend:0", rank_table="/t.json", exec_timeout_s=136, buffer_mib=mib))
    assert [os.environ.get(name) for name in names] == ["120", "136", told]
