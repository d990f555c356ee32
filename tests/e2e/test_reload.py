"""Another configuration while clients use the service: no request is lost, and a wrong file changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd.protocol.errors import RequestError

from .support import (
    Bare,
    Load,
    Question,
    Zoo,
    ask_all,
    config_of,
    mlp_inputs,
    model_status,
    ready_workers,
)

pytestmark = pytest.mark.e2e

# What an engine does has nothing to do with it.
ENGINE = "onnxruntime"
WORKERS = 2


@pytest.fixture(scope="module")
def questions(zoo: Zoo, bare: Bare) -> list[Question]:
    return bare.questions(zoo.path("mlp", ENGINE), mlp_inputs((1, 2, 40, 7, 64, 1)))


@pytest.fixture
def service(zoo: Zoo) -> Iterator[Service]:
    table = {"path": zoo.path("mlp", ENGINE), "workers": WORKERS, "predict_timeout": 2.0}
    with Service({"mlp": table}, verbose=True) as service:
        service.ready()
        yield service


def pids(service: Service) -> set[int]:
    return {each.pid for each in ready_workers(service, "mlp")}


def are_replaced(service: Service, old: set[int]) -> bool:
    now = pids(service)
    return len(now) == WORKERS and not now & old


@pytest.mark.parametrize("how", ["SIGHUP", "weightctl"])
def test_a_reload_loses_no_request(service: Service, zoo: Zoo, questions: list[Question], how: str) -> None:
    config = config_of(service)
    before = pids(service)
    old = config.read_text("utf-8")
    other = f'[models.other]\npath = "{zoo.path("two_inputs", ENGINE)}"\n' + (
        line + "\n" if (line := next((each for each in old.splitlines() if each.startswith("python")), "")) else ""
    )
    config.write_text(old.replace("predict_timeout = 2.0", "predict_timeout = 3.0\nthreads = 2") + other, "utf-8")

    def reload() -> None:
        if how == "SIGHUP":
            os.kill(service.pid, signal.SIGHUP)
        else:
            with service.client() as client:
                assert client.reload().changed == ("mlp",)

    with Load(service.address, "mlp", questions, clients=2, in_flight=4) as load:
        load.wait_for(20)
        reload()
        until(lambda: are_replaced(service, before), "the changed model serves")
        load.wait_for(20)
    with service.client() as client:
        assert client.server().models == ("mlp", "other")
        assert client.infer("other", {"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)})
        config.write_text(old, "utf-8")
        client.reload()
        assert client.server().models == ("mlp",)
        until(lambda: not list(service.cache.glob("*/other*")), "the removed model leaves, and its files with it")
    assert service.stop() == 0


WRONG = [
    ("workers = 2", "workers = 0\nthreads = 0", ["models.mlp.workers: expected ", "models.mlp.threads: expected "]),
    ("[daemon]", "[daemon", ["not TOML"]),
    ("[daemon]", "[daemon]\ndrain_timeout = 3.0\nkind = 1", ["daemon.kind"]),
    ("runtime_dir = ", 'runtime_dir = "/tmp/elsewhere" #', ["daemon.runtime_dir: expected "]),
]


def test_a_wrong_file_changes_nothing_and_says_why(service: Service) -> None:
    text = config_of(service).read_text("utf-8")
    before = pids(service)
    with service.client() as client:
        for old, new, problems in WRONG:
            assert old in text
            config_of(service).write_text(text.replace(old, new), "utf-8")
            with pytest.raises(RequestError) as caught:
                client.reload()
            assert caught.value.code == "INVALID_ARGUMENT"
            assert [each for each in problems if each not in str(caught.value)] == [], caught.value
    os.kill(service.pid, signal.SIGHUP)
    until(lambda: "not reloaded, nothing has changed" in service.log, "the log says so")
    assert pids(service) == before


def test_a_change_that_cannot_be_loaded_leaves_what_serves(service: Service, questions: list[Question]) -> None:
    text = config_of(service).read_text("utf-8")
    [line] = [each for each in text.splitlines() if each.startswith("path = ")]
    config_of(service).write_text(text.replace(line, line.replace("mlp.", "none.")), "utf-8")
    with service.client() as client:
        client.reload()
        note = until(lambda: model_status(service, "mlp").note, "it is told")
        assert "the changed configuration is not in force" in note
        assert "No such file" in note
        ask_all(client, "mlp", questions)
