"""Fixtures of the documentation tests: a daemon with small models, named as on the pages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import models
from testkit.service import Service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models")
    tables = {
        "digits": {"path": models.tiny(directory / "digits.onnx")},
        "pair": {"path": models.two_inputs(directory / "pair.onnx")},
        "words": {"path": models.integers(directory / "words.onnx")},
    }
    with Service(tables) as service:
        yield service


@pytest.fixture(scope="session")
def env(service: Service) -> dict[str, str]:
    """The environment in which clients find the daemon."""
    return {"WEIGHTD_SOCKET": service.address}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, because the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="weightd-", dir="/tmp") as path:
        yield Path(path)
