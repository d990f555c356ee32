"""Fixtures of the tests with a real Ray, which `make test-ray` runs in a separate virtual environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import models
from testkit.plain import PlainProcess
from testkit.raynodes import Nodes, nodes

from .http_clients import SampleRequests


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two models with the same shapes: a.onnx and b.onnx."""
    directory = tmp_path_factory.mktemp("zoo")
    models.tiny(directory / "a.onnx", seed=1)
    models.tiny(directory / "b.onnx", seed=2)
    return directory


@pytest.fixture(scope="session")
def questions(zoo: Path) -> SampleRequests:
    """Requests with the answers of both models, computed by the engine without weightd."""
    with PlainProcess(zoo / "a.onnx", "onnxruntime") as a, PlainProcess(zoo / "b.onnx", "onnxruntime") as b:
        return SampleRequests({"a": a, "b": b})


@pytest.fixture(scope="module")
def one() -> Iterator[Nodes]:
    """A cluster of one node, shared by the tests of a module."""
    with nodes(1) as made:
        yield made
