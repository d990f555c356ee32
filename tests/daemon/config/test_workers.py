"""Tests of the key `workers`: a number, or a table of bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.config.check import describe_config
from weightd_daemon.config.load import ConfigError, parse
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.workers import WorkerRange
from weightd_protocol.schema import decode, plain


def config(workers: Any, **keys: Any) -> Any:
    return parse({"models": {"m": {"path": "/m.onnx", "workers": workers, **keys}}}, Path("/"))


@pytest.mark.parametrize(
    ("workers", "expected", "bounds", "text"),
    [
        (3, 3, (3, 3), "3 workers"),
        ({"min": 1, "max": 8}, WorkerRange(1, 8, 30.0), (1, 8), "1 to 8 workers"),
        ({"min": 2, "max": 2, "idle": 5}, WorkerRange(2, 2, 5.0), (2, 2), "2 workers"),
    ],
)
def test_number_and_bounds_are_read_and_kept(workers: Any, expected: Any, bounds: tuple[int, int], text: str) -> None:
    whole = config(workers, devices=["cpu"])
    model = whole.models["m"]
    assert (model.workers, (model.min_workers, model.max_workers)) == (expected, bounds)
    assert model.max_concurrency == bounds[1]
    assert next(iter(describe_config(whole))) == f"m: onnxruntime, {text}, /m.onnx"
    stored = json.loads(json.dumps(plain(model)))
    assert decode(ModelConfig, stored).workers == expected


@pytest.mark.parametrize(
    ("workers", "keys", "text"),
    [
        ("4", {}, "expected integer, 1 to 1024, or a table with min and max, got str '4'"),
        (True, {}, "expected integer, 1 to 1024, or a table with min and max, got bool True"),
        (0, {}, "expected integer, 1 to 1024, got int 0"),
        ({"min": 1}, {}, ".max: missing"),
        ({"min": 4, "max": 3}, {}, ".max: expected at least min, 4, got 3"),
        ({"min": 1, "max": 2, "idle": 0}, {}, ".idle: expected number of more than 0 and at most 31536000, got int 0"),
        ({"min": 1, "max": 2, "most": 3}, {}, ".most: unknown field; expected one of min, max, idle"),
        (
            {"min": 1, "max": 2},
            {"path": "/m.mindir", "devices": ["ascend:0"]},
            "expected a number on cards, where the processes are known when the model is built",
        ),
    ],
)
def test_wrong_values_are_refused(workers: Any, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(workers, **keys)
    [problem] = caught.value.problems
    separator = "" if text.startswith(".") else ": "
    assert problem == f"models.m.workers{separator}{text}"


def test_spares_count_beside_most_workers() -> None:
    assert config({"min": 1, "max": 1000}, spares=24).models["m"].spares == 24
    with pytest.raises(ConfigError, match="expected at most 1024 workers and spares, got 1025"):
        config({"min": 1, "max": 1000}, spares=25)
