"""A real daemon with ranks of the real MindSpore."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.ranks import Slices, inputs
from testkit.service import Service

pytestmark = pytest.mark.e2e

MODEL = "mlp"


@pytest.fixture
def service(slices: Slices, python: Path) -> Iterator[Service]:
    table = {
        "engine": "mindspore",
        "path": slices.pattern,
        "python": str(python),
        "canary": str(slices.canary),
        "canary_tolerance": 1e-5,
        "ranks": {"devices": ["cpu", "cpu"]},
    }
    with Service({MODEL: table}) as service:
        yield service


def test_ranks_answer_and_those_that_have_lost_one_are_replaced(service: Service, slices: Slices) -> None:
    with service.client() as client, np.load(slices.canary) as canary:
        answer = client.infer(MODEL, {"x": canary["x"]}, timeout=100)["output_0"]
        assert np.allclose(answer, canary["output_0"], atol=1e-5)
        known = [(x, client.infer(MODEL, x)["output_0"]) for x in map(inputs, (1, 7, 4))]
        processes = {each.name: each for each in service.processes()}
        assert [*processes] == ["mlp.1.broker", "mlp.1.rank0", "mlp.1.rank1"]
        os.kill(processes["mlp.1.rank0"].pid, signal.SIGKILL)
        for x, expected in known:
            assert np.array_equal(client.infer(MODEL, x, timeout=100)["output_0"], expected)
        assert [each.name for each in service.processes()] == ["mlp.2.broker", "mlp.2.rank0", "mlp.2.rank1"]
        assert "mlp.1 failed: mlp.1.rank0: killed by SIGKILL" in service.log
