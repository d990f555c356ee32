"""The number of function calls that the daemon makes for one small request.

Each call costs about a third of a microsecond, and a request consists of little else. The limits keep additions to the
path of a request visible; lower them when the path becomes shorter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testkit import models
from testkit.waiting import until
from weightd import Client

from .support import LIMIT_S, ONE_ENGINE

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

MAX_PYTHON_CALLS = 77
MAX_C_CALLS = 87

FEW, MANY = 200, 1700
ROW = {"x": np.ones((1, 64), np.float32)}


def counts(directory: Path, requests: int) -> dict[str, int]:
    """Return the calls of a daemon that has served this number of requests, one at a time."""
    config, result = directory / "weightd.toml", directory / f"{requests}.json"
    command = [sys.executable, "-m", "testkit.counting_daemon", str(result), "serve", str(config)]
    support = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": support}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as daemon:
        try:
            until((directory / "w.sock.unix").exists, "the daemon listens")
            with Client(str(directory / "w.sock"), timeout=LIMIT_S) as client:
                for _ in range(requests):
                    client.infer("m", ROW)
        finally:
            daemon.send_signal(signal.SIGTERM)
    found: dict[str, int] = json.loads(result.read_text("utf-8"))
    return found


def test_request_needs_few_calls(tmp_path: Path) -> None:
    path = models.tiny(tmp_path / "m.onnx")
    (tmp_path / "weightd.toml").write_text(
        f'[daemon]\nsocket = "ipc://{tmp_path}/w.sock"\nruntime_dir = "{tmp_path}"\ncache_dir = "{tmp_path}/cache"\n'
        f'[models.m]\npath = "{path}"\n'
    )
    few, many = counts(tmp_path, FEW), counts(tmp_path, MANY)
    python, c = ((many[event] - few[event]) / (MANY - FEW) for event in ("call", "c_call"))
    # The calls of the start differ from run to run.
    assert python <= MAX_PYTHON_CALLS
    assert c <= MAX_C_CALLS
    print(f"{python:.1f} calls of Python functions, {c:.1f} of C functions")
