"""Fixtures: two ranks on a host with eight cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from ascendsim import Host, ranks
from ascendsim.program import Program
from ascendsim.ranks import Slices

from ..support import Start
from .support import EXEC, World


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", cards=8)


@pytest.fixture
def cut(tmp_path: Path) -> Slices:
    return ranks.mlp(tmp_path / "slices")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return ranks.table(tmp_path / "table.json", [0, 1])


@pytest.fixture
def x() -> Any:
    return np.random.RandomState(1).standard_normal((3, 16)).astype(np.float32)


@pytest.fixture
def world(start: Start, cut: Slices, table: Path) -> World:
    """Return a function that starts the ranks of a model and builds each."""

    def world(cut: Slices = cut, table: Path = table, config: Any = None, **variables: str) -> List[Program]:
        programs = [start(**{**EXEC, **variables}) for _ in cut.paths]
        for rank, program in enumerate(programs):
            groups = cut.group_infos[rank] if cut.group_infos else ""
            build = "rank(path, table, number, groups=groups, config=config)"
            program.do(build, path=cut.paths[rank], table=table, number=rank, groups=groups, config=config)
        return programs

    return world
