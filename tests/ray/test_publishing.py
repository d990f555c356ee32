"""Models in the object store: published, fetched by replicas, and gone again."""

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

from .asking import SampleRequests, ask, output

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def published(one: Nodes, zoo: Path) -> Iterator[str]:
    """The name of a.onnx in the object store."""
    del one
    name = publish(zoo / "a.onnx")
    yield name
    unpublish(name)


def kept(one: Nodes) -> list[Path]:
    return list((one.base / "models").glob("?" * 64))


def test_a_replica_serves_what_was_published_and_its_host_has_one_copy(
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
    # A file that has been damaged is noticed by who comes next.
    one.delete("p")
    one.delete("q")
    (copy / "files" / "a.onnx").write_bytes(b"damaged")
    one.run(one.application("p", a))
    assert ask(one.http, "/p/v2/models/a/infer", questions.bodies[0]).status == 200
    one.delete("p")


def test_what_is_published_already_is_not_published_again(published: str, zoo: Path) -> None:
    assert publish(zoo / "a.onnx") == published


def test_a_file_that_changes_while_it_is_published_is_told(
    one: Nodes, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del one
    path = tmp_path / "c.onnx"
    shutil.copy(zoo / "a.onnx", path)

    def digest_before(_: Path) -> str:
        found = digest(path)
        shutil.copy(zoo / "b.onnx", path)
        return found

    # It would be published by the name of what it was, and no replica would take it.
    monkeypatch.setattr(model_store, "digest", digest_before)
    with pytest.raises(ModelFileError, match="changed while it was copied"):
        publish(path)


def test_a_publication_that_is_lost_on_the_way_is_told(
    one: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del one
    put = getattr(model_store, "_put_file")  # noqa: B009 - its shelf is nobody else's to kill

    def put_on_none(shelf: Any, *more: Any) -> None:
        ray.kill(shelf)
        put(shelf, *more)

    monkeypatch.setattr(model_store, "_put_file", put_on_none)
    with pytest.raises(Unavailable, match="put there: Actor"):
        publish(models.tiny(tmp_path / "z.onnx", seed=9))


def test_a_model_with_files_beside_it_comes_with_all_of_them(one: Nodes, tmp_path: Path) -> None:
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


def test_what_is_not_published_is_told(one: Nodes) -> None:
    with pytest.raises(NotFound, match="no model sha256:abab"):
        unpublish("sha256:" + "ab" * 32)
    del one


def test_the_command_publishes_for_whoever_comes_later(one: Nodes, zoo: Path) -> None:
    del one
    address = ray.get_runtime_context().gcs_address

    # Its address is a loopback one: see testkit.raynodes.
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
