"""Model groups: several models in one process on a simulated card."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendsim import Host, environment, models
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd import FailedPrecondition

from ..support import Load, ask_all
from .support import WIDTH, questions, status

pytestmark = pytest.mark.e2e

NAMES = ("prompt", "decode")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: models.mlp(directory / f"{name}.mindir", width=WIDTH, seed=seed) for seed, name in enumerate(NAMES)}


GROUPS = {"both": {"models": list(NAMES)}}


def tables(paths: dict[str, Path]) -> dict[str, dict[str, object]]:
    more = {"python": sys.executable, "devices": ["ascend:0"]}
    return {name: {"path": path, **more} for name, path in paths.items()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", cards=1)


@pytest.fixture
def service(host: Host, paths: dict[str, Path]) -> Iterator[Service]:
    with Service(tables(paths), env=environment(host), groups=GROUPS) as service:
        yield service


def test_replaced_process_serves_all_models_of_group(service: Service, paths: dict[str, Path]) -> None:
    with service.client() as client:
        for name, path in paths.items():
            ask_all(client, name, questions(path))
        [pid] = {each.pid for each in service.processes()}
        assert [status(service, name).generations[0].processes[0].role for name in NAMES] == ["rank"] * 2
        with (
            Load(service.address, NAMES[0], questions(paths[NAMES[0]])) as first,
            Load(service.address, NAMES[1], questions(paths[NAMES[1]])) as second,
        ):
            first.wait_for(20)
            second.wait_for(20)
            os.kill(pid, signal.SIGKILL)
            first.wait_for(20)
            second.wait_for(20)
        until(lambda: pid not in {each.pid for each in service.processes()}, "the process exits")
        assert len({each.pid for each in service.processes()}) == 1
        with pytest.raises(FailedPrecondition, match=r"\(group both\) and cannot be updated alone"):
            client.update(NAMES[0], path=str(paths[NAMES[1]]))


def test_reload_of_one_model_replaces_group(service: Service, paths: dict[str, Path]) -> None:
    with service.client() as client, Load(service.address, NAMES[1], questions(paths[NAMES[1]])) as load:
        load.wait_for(20)
        service.config.write_text(
            service.config.read_text().replace("[models.prompt]", "[models.prompt]\ntimeout = 20.0")
        )
        assert client.reload().changed == NAMES
        until(
            lambda: {status(service, name).generations[0].number for name in NAMES} == {2},
            "both models serve the changed configuration",
        )
        load.wait_for(20)
        for name, path in paths.items():
            ask_all(client, name, questions(path))
        assert len({each.pid for each in service.processes()}) == 1


def test_restart_of_daemon_reloads_group(host: Host, paths: dict[str, Path]) -> None:
    with ManagedService(tables(paths), env=environment(host), groups=GROUPS) as service, service.client() as client:
        for name, path in paths.items():
            ask_all(client, name, questions(path))
        [before] = {each.pid for each in service.processes()}
        service.restart(signal.SIGTERM)
        for name, path in paths.items():
            ask_all(client, name, questions(path))
        assert before not in {each.pid for each in service.processes()}
