"""KServe's clients with a real gateway. They depend on 67 packages, so they have a separate virtual environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from testkit import mindir, models
from testkit.gatewayprocess import GatewayProcess
from testkit.service import Service

from .support import ONE_ENGINE

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

PYTHON = mindir.REPOSITORY / ".venv-kserve" / "bin" / "python"
CHILD = mindir.REPOSITORY / "tests" / "support" / "testkit" / "kserve_child.py"

X = np.arange(64, dtype=np.float32).reshape(1, 64) / 64


@pytest.mark.skipif(not PYTHON.exists(), reason="no kserve: `make test-kserve` installs it")
def test_kserve_clients_get_answers_of_native_client(tmp_path: Path) -> None:
    with Service({"tiny": {"path": models.tiny(tmp_path / "tiny.onnx")}}) as service:
        service.ready()
        with GatewayProcess(tmp_path, service.address) as gateway, service.client() as native:
            addresses = [f"http://127.0.0.1:{gateway.port('http')}", f"127.0.0.1:{gateway.port('grpc')}"]
            command = [str(PYTHON), "-I", str(CHILD), *addresses, "tiny"]
            text = json.dumps(X.tolist())
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stderr
            answers = json.loads(done.stdout)
            expected = native.infer("tiny", {"x": X})["y"].tolist()
    assert {way: answers[way] for way in ("json", "binary", "typed", "raw")} == dict.fromkeys(
        ("json", "binary", "typed", "raw"), expected
    )
    assert answers["rest"] == answers["grpc"] == [True, True, True]
