"""The kit of tests with a real Ray: clusters on this machine, run by `make test-ray` in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before Ray is imported. Nothing is told to anybody, and nothing is written but below the tests' own directory; all of
# it is on the loopback interface.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_DISABLE_IMPORT_WARNING="1",
    RAY_enable_metrics_collection="0",
    RAY_SERVE_LOG_TO_STDERR="0",
)

from testkit import models  # noqa: E402
from testkit.plain import PlainProcess  # noqa: E402

from .asking import Questions  # noqa: E402
from .nodes import Nodes, nodes  # noqa: E402


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one shape: a.onnx and b.onnx."""
    directory = tmp_path_factory.mktemp("zoo")
    models.tiny(directory / "a.onnx", seed=1)
    models.tiny(directory / "b.onnx", seed=2)
    return directory


@pytest.fixture(scope="session")
def questions(zoo: Path) -> Questions:
    """Questions with the right answers of both, from the engine itself."""
    with PlainProcess(zoo / "a.onnx", "onnxruntime") as a, PlainProcess(zoo / "b.onnx", "onnxruntime") as b:
        return Questions({"a": a, "b": b})


@pytest.fixture(scope="module")
def one() -> Iterator[Nodes]:
    """A cluster of one node, for all tests of a module."""
    with nodes(1) as made:
        yield made
