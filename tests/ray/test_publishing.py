"""Models in Ray's object store: publish, fetch by replicas, and unpublish."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

from testkit import models
from testkit.raynodes import Nodes
from weightd_common.modelfiles.files import ModelFileError, digest
from weightd_protocol.errors import NotFound, Unavailable
from weightd_ray import model_store, publish, unpublish

from .http_clients import SampleRequests, ask, output

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def published(one: Nodes, zoo: Path) -> Iterator[str]:
    """The name under which a.onnx is published."""
    del one
    name = publish(zoo / "a.onnx")
    yield name
    unpublish(name)


def kept(one: Nodes) -> list[Path]:
    return list((one.base / "models").glob("?" * 64))


def test_replicas_of_host_share_one_copy_of_published_model(
    one: Nodes, zoo: Path, published: str, questions: SampleRequests
) -> None:
    assert published == "sha256:" + hashlib.sha256((zoo / "a.onnx").read_bytes()).hexdigest()
    a = {"model": published, "name": "a"}
    one.run(one.application("p", a), one.application("q", a))
    for prefix in "pq":
        reply = ask(one.http, f"/{prefix}/v2/models/a/infer", questions.bodies[0])
        assert questions.model_of(0, output(reply.body)) == "a"
    (copy,) = kept(one)
    assert f"sha256:{copy.name}" == published
    # The next replica notices a damaged file and fetches it again.
    one.delete("p")
    one.delete("q")
    (copy / "files" / "a.onnx").write_bytes(b"damaged")
    one.run(one.application("p", a))
    assert ask(one.http, "/p/v2/models/a/infer", questions.bodies[0]).status == 200
    one.delete("p")


def test_publish_is_idempotent(published: str, zoo: Path) -> None:
    assert publish(zoo / "a.onnx") == published


def test_publish_rejects_file_that_changes(
    one: Nodes, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del one
    path = tmp_path / "c.onnx"
    shutil.copy(zoo / "a.onnx", path)

    def digest_before(_: Path) -> str:
        found = digest(path)
        shutil.copy(zoo / "b.onnx", path)
        return found

    # Otherwise it would be published under the digest of the old content, and every replica would reject it.
    monkeypatch.setattr(model_store, "digest", digest_before)
    with pytest.raises(ModelFileError, match="changed while it was copied"):
        publish(path)


def test_publish_fails_if_store_dies(one: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del one
    put = getattr(model_store, "_put_file")  # noqa: B009 - the test replaces the private function

    def put_to_killed_store(store: Any, *more: Any) -> None:
        ray.kill(store)
        put(store, *more)

    monkeypatch.setattr(model_store, "_put_file", put_to_killed_store)
    with pytest.raises(Unavailable, match="object store: Actor"):
        publish(models.tiny(tmp_path / "z.onnx", seed=9))


def test_publishes_external_data_files(one: Nodes, tmp_path: Path) -> None:
    path = models.with_external_data(tmp_path / "e.onnx")
    assert len(list(tmp_path.iterdir())) > 1
    name = publish(path)
    assert name == f"sha256:{digest(path)}"
    try:
        one.run(one.application("e", {"model": name, "name": "e"}))
        x = np.ones((1, 64), np.float32)
        assert serve.get_app_handle("e").infer.remote({"x": x}).result()["y"].shape == (1, 64)
    finally:
        one.delete("e")
        unpublish(name)


def test_unpublish_of_unknown_model_fails(one: Nodes) -> None:
    with pytest.raises(NotFound, match="no model sha256:abab"):
        unpublish("sha256:" + "ab" * 32)
    del one


def test_command_publishes_beyond_its_own_lifetime(one: Nodes, zoo: Path) -> None:
    del one
    address = ray.get_runtime_context().gcs_address

    # The test cluster has a loopback address; see testkit.raynodes.
    program = "from ray._private import ray_constants as c; c.ENABLE_RAY_CLUSTER = False; import sys; "
    program += "from weightd_ray.__main__ import main; sys.exit(main(sys.argv[1:]))"

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        full = [sys.executable, "-c", program, *arguments]
        env = {**os.environ, "RAY_ADDRESS": address}
        return subprocess.run(full, capture_output=True, text=True, env=env, timeout=60, check=False)

    done = command("publish", str(zoo / "b.onnx"))
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    assert name == f"sha256:{digest(zoo / 'b.onnx')}"
    assert publish(zoo / "b.onnx") == name
    assert command("unpublish", name).returncode == 0
    again = command("unpublish", name)
    assert again.returncode == 1
    assert "is published in this cluster" in again.stderr
