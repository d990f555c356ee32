"""Fixtures: a simulated host, models, and programs that run on it.

The engine's tests (worker/engines/test_ascend.py) cover much of the simulator. These tests cover the traps that the
engine avoids and would not miss, and the features that only whole services use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generator, List

import numpy as np
import pytest

from ascendsim import Host, models
from ascendsim.program import Program, ProgramForkServer

from .support import Start


@pytest.fixture(scope="session")
def nursery() -> Generator[ProgramForkServer, None, None]:
    with ProgramForkServer() as nursery:
        yield nursery


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", cards=2)


@pytest.fixture
def start(nursery: ProgramForkServer, host: Host, path: Path, x: Any) -> Generator[Start, None, None]:
    """Return a function that starts a program on the host with the variables `path` and `x`."""
    programs: List[Program] = []

    def start(**options: Any) -> Program:
        programs.append(nursery.start(host, **options))
        programs[-1].do("pass", path=path, x=x)
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


@pytest.fixture
def program(start: Start) -> Program:
    return start()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a model with a free batch."""
    return models.mlp(tmp_path / "mlp.mindir")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return the path of a model of the same size with other weights."""
    return models.mlp(tmp_path / "other.mindir", seed=9)


@pytest.fixture
def x() -> Any:
    return np.random.RandomState(1).standard_normal((3, 64)).astype(np.float32)
