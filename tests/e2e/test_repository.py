"""A model repository: models and versions appear, change, break and vanish while clients send requests."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from testkit import models
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd import NotFound

from .support import ONE_ENGINE, BareEngine, Load, ask_all, mlp_inputs, model_status

pytestmark = [pytest.mark.e2e, ONE_ENGINE]


class Repository:
    """A directory of models, and requests with the answers of three different model files."""

    def __init__(self, directory: Path, bare: BareEngine) -> None:
        self.root = directory / "repository"
        self.root.mkdir()
        inputs = mlp_inputs((1, 2), 64)
        self.files = {seed: models.tiny(directory / f"{seed}.onnx", seed) for seed in (1, 2, 3)}
        self.questions = {seed: bare.questions(path, inputs) for seed, path in self.files.items()}

    def add(self, version: int, seed: int = 0) -> None:
        """Put a version of the model `m` into the repository: this file or, with 0, one that is no model."""
        there = self.root / f"m/{version}"
        there.mkdir(parents=True, exist_ok=True)
        if seed:
            shutil.copyfile(self.files[seed], there / "model.onnx")
        else:
            (there / "model.onnx").write_bytes(b"not a model")

    @property
    def tables(self) -> dict[str, object]:
        return {"path": self.root, "settle": 0.3, "poll": 2.0}


@pytest.fixture
def repository(tmp_path: Path, bare: BareEngine) -> Repository:
    return Repository(tmp_path, bare)


def names(service: Service) -> set[str]:
    with service.client() as client:
        return {each.name for each in client.status().models}


def wait_for(service: Service, *expected: str) -> None:
    until(lambda: names(service) == {*expected}, f"{', '.join(expected)} are served")


def test_new_version_replaces_the_old_one_under_load(repository: Repository) -> None:
    with Service({}, repository=repository.tables) as service, service.client() as client:
        with pytest.raises(NotFound):
            client.infer("m", repository.questions[1][0].inputs)
        repository.add(1, 1)
        wait_for(service, "m@1")
        ask_all(client, "m", repository.questions[1])
        # A version with the same content: every answer has to be right before, during and after the change.
        with Load(service.address, "m", repository.questions[1], clients=2) as load:
            load.wait_for(20)
            repository.add(2, 1)
            wait_for(service, "m@2")
            load.wait_for(20)
        repository.add(5, 3)
        wait_for(service, "m@5")
        ask_all(client, "m", repository.questions[3])


def test_broken_version_never_replaces_a_good_one(repository: Repository) -> None:
    repository.add(1, 1)
    with ManagedService({}, repository=repository.tables) as service:
        wait_for(service, "m@1")
        with service.client() as client:
            ask_all(client, "m", repository.questions[1])
            repository.add(2)
            wait_for(service, "m@1", "m@2")
            until(lambda: model_status(service, "m@2").state == "failed", "version 2 fails")
            ask_all(client, "m", repository.questions[1])
        service.restart(signal.SIGKILL)
        with service.client() as client:
            ask_all(client, "m", repository.questions[1])
            assert names(service) == {"m@1", "m@2"}
            # The version is repaired where it is.
            repository.add(2, 2)
            wait_for(service, "m@2")
            ask_all(client, "m", repository.questions[2])


def test_unloaded_version_answers_after_a_restart(repository: Repository) -> None:
    repository.add(1, 1)
    with ManagedService({}, repository={**repository.tables, "settle": 0.0}) as service:
        with service.client() as client:
            wait_for(service, "m@1")
            ask_all(client, "m", repository.questions[1])
            client.unload("m@1")
        os.kill(service.pid, signal.SIGTERM)
        service.wait()
        # Valid protobuf for the daemon, but not a model for the engine.
        broken = repository.root / "m/2/model.onnx"
        broken.parent.mkdir()
        broken.write_bytes(b"\x08\x08")
        service.start_again()
        with service.client() as client:
            ask_all(client, "m", repository.questions[1])
            until(lambda: model_status(service, "m@2").state == "failed", "version 2 fails")
            ask_all(client, "m", repository.questions[1])


def test_changes_of_one_model(repository: Repository) -> None:
    repository.add(1, 1)
    with Service({}, repository={**repository.tables, "load": "start"}) as service, service.client() as client:
        wait_for(service, "m@1")
        ask_all(client, "m", repository.questions[1])
        (repository.root / "m/config.toml").write_text("workers = 2")
        until(lambda: len(service.processes()) >= 2, "the model has two workers")
        (repository.root / "m/config.toml").write_text("workers = nonsense")
        until(lambda: "config.toml: not TOML" in client.status().note, "the error is shown")
        ask_all(client, "m", repository.questions[1])
        (repository.root / "m/config.toml").unlink()
        until(lambda: not client.status().note, "the error is gone")
        shutil.rmtree(repository.root / "m")
        wait_for(service)
