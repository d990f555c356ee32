"""Fixtures: this interpreter's engine with and without parallel predicts, for the tests of the common contract."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings, Engine

ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
KINDS: Dict[str, Dict[str, Any]] = {"alone": {}}
if ENGINE == "mindspore_lite":
    KINDS["parallel"] = {"parallel_workers": 2}


def make(kind: str) -> Engine:
    return ENGINES[ENGINE](BuildSettings(1, "cpu", options=KINDS[kind]))


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Return how the engine runs predicts: one at a time or several in parallel."""
    return str(request.param)


@pytest.fixture
def engine(kind: str) -> Engine:
    return make(kind)


@pytest.fixture(scope="session")
def built(kind: str, model: Callable[[str], Path]) -> Callable[[str], Engine]:
    @functools.lru_cache(maxsize=None)
    def build(name: str) -> Engine:
        made = make(kind)
        made.build(str(model(name)))
        return made

    return build
