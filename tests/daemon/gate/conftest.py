"""A ROUTER socket as a gate has it, and clients that connect to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from weightd.daemon.gate.peers import Peers

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
def router(context: zmq.Context[Socket]) -> Socket:
    """Not bound yet."""
    made = context.socket(zmq.ROUTER)
    made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return made


@pytest.fixture
def peers(router: Socket, address: str) -> Iterator[Peers]:
    made = Peers(router)
    router.bind(address)
    yield made
    made.close()


@pytest.fixture
def connect(context: zmq.Context[Socket], address: str) -> Iterator[Callable[..., Socket]]:
    made: list[Socket] = []

    def connected(name: bytes = b"", high_water_mark: int = 1000) -> Socket:
        made.append(context.socket(zmq.DEALER))
        made[-1].setsockopt(zmq.RCVHWM, high_water_mark)
        if name:
            made[-1].setsockopt(zmq.ROUTING_ID, name)
        made[-1].connect(address)
        made[-1].send(b"hello")
        return made[-1]

    yield connected
    for each in made:
        each.close(linger=0)
