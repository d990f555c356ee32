"""Helpers of the Ascend tests: a daemon with real processes on simulated cards."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ascendsim import Host, environment, models
from testkit.managed import ManagedService
from testkit.service import Models, Service
from testkit.waiting import until
from weightd_protocol.messages.status import DeviceStatus, ModelStatus

from ..support import SampleRequest, mlp_inputs

MODEL = "mlp"
WIDTH = 64

S = TypeVar("S", bound=Service)

# Tests that share a service must restore all processes and the original faults and switches.


@dataclass
class Cards:
    """A host with two cards, a model, and the directory of both."""

    directory: Path
    host: Host
    model: Path

    def mlp(self, name: str, seed: int = 0, *, bundle: bool = False) -> Path:
        return models.mlp(self.directory / f"{name}.mindir", width=WIDTH, seed=seed, bundle=bundle)

    @contextlib.contextmanager
    def service(self, tables: Models, daemon: Mapping[str, object] | None = None) -> Generator[Service]:
        with Service(tables, daemon, env=environment(self.host)) as service:
            yield service

    @contextlib.contextmanager
    def ready(self, **table: object) -> Generator[Service]:
        """Serve the model, by default on card 0 with two workers and a spare; all are READY on return."""
        with self.service({MODEL: on_card(self.model, **table)}) as service:
            wait_for_all(service)
            yield service

    @contextlib.contextmanager
    def managed(self) -> Generator[ManagedService]:
        """Like `ready`, under a service manager."""
        with ManagedService({MODEL: on_card(self.model)}, env=environment(self.host)) as service:
            wait_for_all(service)
            yield service


def make_host(directory: Path) -> Cards:
    """Create a host with two cards, and a model."""
    return Cards(directory, Host(directory / "host", cards=2), models.mlp(directory / f"{MODEL}.mindir", width=WIDTH))


def on_card(path: Path, /, **more: object) -> dict[str, object]:
    """Return the table of a model on card 0: two workers and a spare."""
    table = {"path": path, "python": sys.executable, "workers": 2, "spares": 1, "devices": ["ascend:0"]}
    return {**table, **more}


def questions(path: Path) -> list[SampleRequest]:
    """Return requests with expected answers, computed independently of the service."""
    return [SampleRequest(inputs, models.answers(path, dict(inputs))) for inputs in mlp_inputs((1, 3, 2, 7), WIDTH)]


def status(service: Service, name: str = MODEL) -> ModelStatus:
    return next(model for model in service.status().models if model.name == name)


def device(service: Service) -> DeviceStatus:
    return next(each for each in service.status().devices if each.name == "ascend:0")


def wait_for_all(service: Service) -> None:
    """Wait until all workers and spares of the service are READY."""
    service.ready()
    until(lambda: all(each.progress == "serving" for each in status(service).generations), "the spares are READY")


def number(service: Service) -> int:
    return status(service).generations[-1].number


def serves(service: Service, number: int) -> bool:
    """Return whether only this generation exists, with all its processes serving."""
    generations = status(service).generations
    return [(each.number, each.progress) for each in generations] == [(number, "serving")]


def names(service: Service, role: str) -> list[str]:
    return [
        each.name for each in service.processes() if (each.role, each.state) in ((role, "ready"), (role, "holding"))
    ]


def kill(service: Service, role: str) -> str:
    """Kill one of the processes with this role; return its name."""
    victim = next(each for each in service.processes() if each.role == role)
    os.kill(victim.pid, signal.SIGKILL)
    return victim.name
