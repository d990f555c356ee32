"""Fixtures: a device with a worker and a client, over real sockets and pages."""

from __future__ import annotations

from typing import Generator

import pytest

from testkit.channels import Client, Device, Worker


@pytest.fixture
def device() -> Generator[Device, None, None]:
    made = Device()
    yield made
    made.close()


@pytest.fixture
def worker(device: Device) -> Generator[Worker, None, None]:
    made = Worker(device)
    yield made
    made.channels.close()


@pytest.fixture
def client(device: Device, worker: Worker) -> Client:
    made = device.open()
    worker.add(made)
    return made
