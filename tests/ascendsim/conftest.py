"""A simulated machine, models, and programs that run on it.

What the tests of the engine (worker/engines/test_ascend.py) notice of the simulator is not told again here: here are
the traps that the engine has to avoid, which it would not notice the loss of, and what only whole services use.
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
    """A machine with two cards."""
    return Host(tmp_path / "host", cards=2)


@pytest.fixture
def start(nursery: ProgramForkServer, host: Host, path: Path, x: Any) -> Generator[Start, None, None]:
    """Start a program on the host, which knows `path` and `x`."""
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
    """A model with a free batch."""
    return models.mlp(tmp_path / "mlp.mindir")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of the same size with other weights."""
    return models.mlp(tmp_path / "other.mindir", seed=9)


@pytest.fixture
def x() -> Any:
    return np.random.RandomState(1).standard_normal((3, 64)).astype(np.float32)
