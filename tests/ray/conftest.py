"""The kit of tests with a real Ray: clusters on this machine, run by `make test-ray` in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import models
from testkit.plain import PlainProcess
from testkit.raynodes import Nodes, nodes

from .asking import SampleRequests


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape: a.onnx and b.onnx."""
    directory = tmp_path_factory.mktemp("zoo")
    models.tiny(directory / "a.onnx", seed=1)
    models.tiny(directory / "b.onnx", seed=2)
    return directory


@pytest.fixture(scope="session")
def questions(zoo: Path) -> SampleRequests:
    """Questions with the right answers of both, from the engine itself."""
    with PlainProcess(zoo / "a.onnx", "onnxruntime") as a, PlainProcess(zoo / "b.onnx", "onnxruntime") as b:
        return SampleRequests({"a": a, "b": b})


@pytest.fixture(scope="module")
def one() -> Iterator[Nodes]:
    """A cluster of one node, for all tests of a module."""
    with nodes(1) as made:
        yield made
