"""Tests of MindSpore Lite ranks in environments where a rank cannot run. `ranks/test_group.py` tests ranks in a
group."""

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
def test_reports_missing_requirement(device: str, table: str, problem: str) -> None:
    with pytest.raises(BuildError) as raised:
        MindSporeLiteRank(RankRendezvous(0, 2, device, rank_table=table))
    assert str(raised.value) == problem


def test_rejects_library_without_rank_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mindspore_lite", library(SimpleNamespace(rank_id=0)))
    with pytest.raises(EngineMissing, match="does not support ranks; install"):
        MindSporeLiteRank(RankRendezvous(0, 2, "ascend:0", rank_table="/t.json"))


@pytest.mark.parametrize(("mib", "expected"), [(64, "64"), (0, None)])
def test_sets_hccl_variables_before_import(monkeypatch: pytest.MonkeyPatch, mib: int, expected: Optional[str]) -> None:
    names = ["HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE"]
    for name in names:
        # monkeypatch restores the variables after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "mindspore_lite", None)
    with pytest.raises(EngineMissing):
        MindSporeLiteRank(RankRendezvous(0, 2, "ascend:0", rank_table="/t.json", exec_timeout_s=136, buffer_mib=mib))
    assert [os.environ.get(name) for name in names] == ["120", "136", expected]
