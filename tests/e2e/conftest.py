"""Fixtures: engines, model files built once per session, and engines called without weightd."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import mindir

from .support import ENGINES, BareEngine, DaemonPaths, SampleRequest, Zoo, mlp_inputs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on all engines, unless its module or function names some with the mark `engines`."""
    if "engine" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("engines")
        metafunc.parametrize("engine", mark.args if mark else ENGINES, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> str:
    """The engine under test. With CI=true a missing engine fails the test; otherwise the test is skipped."""
    name: str = request.param
    if name == "mindspore_lite" and mindir.interpreter() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(mindir.HOW_TO_GET_IT)
        pytest.skip(mindir.HOW_TO_GET_IT)
    return name


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def bare() -> Iterator[BareEngine]:
    with contextlib.ExitStack() as stack:
        yield BareEngine(stack)


@pytest.fixture(scope="module")
def mlp(engine: str, zoo: Zoo) -> Path:
    """The model that most tests serve."""
    return zoo.path("mlp", engine)


@pytest.fixture(scope="module")
def questions(mlp: Path, bare: BareEngine) -> list[SampleRequest]:
    """Requests to the mlp model, with the answers of the engine without weightd."""
    return bare.questions(mlp, mlp_inputs((1, 2, 40, 7, 64, 1)))


@pytest.fixture
def place() -> Iterator[DaemonPaths]:
    # Not tmp_path: the path of a socket has at most 107 bytes, and a page store belongs on a disk.
    runtime = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
    build = mindir.REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="place-", dir=build))
    yield DaemonPaths(runtime, cache)
    shutil.rmtree(runtime, ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
