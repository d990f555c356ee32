"""A ROUTER socket, and clients that connect to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from weightd.daemon.clients.listening import listen

Socket = zmq.Socket[bytes]


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    made: zmq.Context[Socket] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def router(context: zmq.Context[Socket], address: str) -> Socket:
    return listen(context, address)


@pytest.fixture
def connect(context: zmq.Context[Socket], address: str) -> Iterator[Callable[..., Socket]]:
    made: list[Socket] = []

    def connected(high_water_mark: int = 1000) -> Socket:
        made.append(context.socket(zmq.DEALER))
        made[-1].setsockopt(zmq.RCVHWM, high_water_mark)
        made[-1].connect(address)
        made[-1].send(b"hello")
        return made[-1]

    yield connected
    for each in made:
        each.close(linger=0)
