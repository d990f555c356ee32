"""Reload while clients send requests: no request is lost, and an invalid file changes nothing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd import InvalidArgument

from .support import ONE_ENGINE, Load, SampleRequest, Zoo, ask_all, model_status, ready_workers

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[Service]:
    table = {"path": mlp, "workers": WORKERS, "predict_timeout": 2.0}
    with Service({"mlp": table}, verbose=True) as service:
        service.ready()
        yield service


@pytest.fixture
def text(service: Service) -> Iterator[str]:
    """The content of the configuration file, restored after the test."""
    text = service.config.read_text("utf-8")
    yield text
    service.config.write_text(text, "utf-8")


def pids(service: Service) -> set[int]:
    return {each.pid for each in ready_workers(service, "mlp")}


WRONG = [
    ("workers = 2", "workers = 0\nthreads = 0", ["models.mlp.workers: expected ", "models.mlp.threads: expected "]),
    ("[daemon]", "[daemon", ["not TOML"]),
    ("[daemon]", "[daemon]\ndrain_timeout = 3.0\nkind = 1", ["daemon.kind"]),
    ("runtime_dir = ", 'runtime_dir = "/tmp/elsewhere" #', ["daemon.runtime_dir: expected "]),
]


def test_invalid_file_changes_nothing(service: Service, text: str) -> None:
    before = pids(service)
    with service.client() as client:
        for old, new, problems in WRONG:
            assert old in text
            service.config.write_text(text.replace(old, new), "utf-8")
            with pytest.raises(InvalidArgument) as caught:
                client.reload()
            assert [each for each in problems if each not in str(caught.value)] == [], caught.value
        service.config.unlink()
        os.mkfifo(service.config)
        with pytest.raises(InvalidArgument, match="expected a regular file"):
            client.reload()
        service.config.unlink()
        service.config.write_text(text.replace("mlp.onnx", "none.onnx"), "utf-8")
        with pytest.raises(InvalidArgument, match=r"models\.mlp\.path: .*none.onnx: No such file or directory"):
            client.reload()
    os.kill(service.pid, signal.SIGHUP)
    until(lambda: "reload failed, nothing changed" in service.log, "the log has the error")
    assert pids(service) == before


def test_keeps_serving_if_changed_model_fails_to_load(
    service: Service, text: str, questions: list[SampleRequest]
) -> None:
    bad = service.config.with_name("bad.onnx")
    bad.write_bytes(b"not a model")
    os.utime(bad, (1e9, 1e9))
    with service.client() as client:
        # The daemon rejects the file before it starts a process; the second file fails in the engine.
        service.config.write_text(re.sub(r'path = ".*mlp.onnx"', f'path = "{bad}"', text), "utf-8")
        with pytest.raises(InvalidArgument, match=r"models\.mlp\.path: .*bad.onnx: expected an ONNX model"):
            client.reload()
        bad.write_bytes(b"\x08\x08")
        client.reload()
        note = until(lambda: model_status(service, "mlp").note, "the status has a note")
        assert "the changed configuration is not in force" in note
        assert "onnxruntime" in note
        ask_all(client, "mlp", questions)


def test_reload_loses_no_request(service: Service, zoo: Zoo, questions: list[SampleRequest], text: str) -> None:
    before = pids(service)
    other = f'[models.other]\npath = "{zoo.path("two_inputs", "onnxruntime")}"\n'
    service.config.write_text(text.replace("predict_timeout = 2.0", "predict_timeout = 3.0\nthreads = 2") + other)

    def are_replaced() -> bool:
        now = pids(service)
        return len(now) == WORKERS and not now & before

    with service.client() as client:
        with Load(service.address, "mlp", questions) as load:
            load.wait_for(20)
            assert client.reload().changed == ("mlp",)
            until(are_replaced, "the changed model serves")
            load.wait_for(20)
        assert client.server().models == ("mlp", "other")
        assert client.infer("other", {"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)})
        service.config.write_text(text, "utf-8")
        os.kill(service.pid, signal.SIGHUP)
        until(lambda: client.server().models == ("mlp",), "the other model is removed")
        until(lambda: not list(service.cache.glob("*/other*")), "the files of the removed model are deleted")
