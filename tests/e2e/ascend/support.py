"""A real daemon with real processes on simulated cards."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendsim import Host, environment, models
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd.client import Client
from weightd.protocol.messages.status import DeviceStatus, GenerationStatus, ModelStatus, ProcessStatus

from ..support import Question, mlp_inputs

MIB = 1024 * 1024
WIDTH = 64
MODEL = "mlp"


@dataclass
class Cards:
    """A host with cards, a model, and the directory that both are in."""

    directory: Path
    host: Host
    model: Path

    def mlp(self, name: str, width: int = WIDTH, seed: int = 0, *, bundle: bool = False) -> Path:
        """Write another model."""
        return models.mlp(self.directory / f"{name}.mindir", width=width, seed=seed, bundle=bundle)

    @contextlib.contextmanager
    def service(self, memory_mib: int = 0, *, verbose: bool = False, **table: object) -> Generator[Service, None, None]:
        """Serve the model on card 0 with two workers and a spare, unless the table says otherwise."""
        tables = {MODEL: {**on_card(self.model), **table}}
        budget = {"ascend:0": {"memory_mib": memory_mib}}
        with Service(tables, devices=budget, env=environment(self.host), verbose=verbose) as service:
            yield service

    @contextlib.contextmanager
    def managed(self) -> Generator[ManagedService, None, None]:
        """Serve the model under a service manager, and wait until every worker and spare is READY."""
        budget = {"ascend:0": {"memory_mib": 0}}
        with ManagedService({MODEL: on_card(self.model)}, devices=budget, env=environment(self.host)) as service:
            service.ready()
            until(lambda: is_complete(service), "the spares are READY")
            yield service

    @contextlib.contextmanager
    def services(self, tables: Mapping[str, Mapping[str, object]]) -> Generator[Service, None, None]:
        """Serve several models."""
        complete = {name: {"python": sys.executable, **table} for name, table in tables.items()}
        with Service(complete, env=environment(self.host)) as service:
            yield service

    @contextlib.contextmanager
    def ready(self, memory_mib: int = 0, **table: Any) -> Generator[tuple[Service, Client], None, None]:
        """Serve the model, and wait until every worker is READY and every spare, too."""
        with self.service(memory_mib, **table) as service, service.client() as client:
            service.ready()
            until(lambda: is_complete(service), "the spares are READY")
            yield service, client


def on_card(path: Path) -> dict[str, object]:
    """Return the table of a model on card 0: two workers and a spare."""
    return {"path": path, "python": sys.executable, "workers": 2, "spares": 1, "devices": ["ascend:0"]}


def questions(path: Path, width: int = WIDTH) -> list[Question]:
    """Return requests and their right answers, computed apart from any process of the service."""
    return [Question(inputs, models.answers(path, dict(inputs))) for inputs in mlp_inputs((1, 3, 2, 7), width)]


def status(service: Service, name: str = MODEL) -> ModelStatus:
    """Return what the daemon says about a model."""
    return next(model for model in service.status().models if model.name == name)


def device(service: Service, name: str = "ascend:0") -> DeviceStatus:
    """Return what the daemon says about a card."""
    return next(each for each in service.status().devices if each.name == name)


def generation(service: Service, number: int) -> GenerationStatus | None:
    """Return a generation of the model, None if there is none (any more)."""
    return next((each for each in status(service).generations if each.number == number), None)


def serves(service: Service, number: int) -> bool:
    """Whether that generation serves with all its processes, and no other is left."""
    generations = status(service).generations
    return [(each.number, each.progress) for each in generations] == [(number, "serving")]


def is_complete(service: Service) -> bool:
    """Whether every process of the model is READY."""
    return all(each.progress == "serving" for each in status(service).generations)


def process(service: Service, name: str) -> ProcessStatus:
    """Return a process of the model, by the end of its name."""
    return next(each for each in service.processes() if each.name.endswith(f".{name}"))


def kill(service: Service, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Kill a process of the model, by the end of its name; return its pid."""
    pid = process(service, name).pid
    os.kill(pid, number)
    return pid


def roles(service: Service) -> dict[str, str]:
    """Return the role of each process, by the end of its name."""
    return {each.name.rpartition(".")[2]: each.role for each in service.processes()}
