"""Fixture: an HTTP gateway connected to a fake daemon that echoes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from testkit import fakedaemon
from testkit.fakedaemon import FakeDaemon, directory
from testkit.httpgateway import HttpGateway
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelReady, ReadyResponse, ServerReady
from weightd_protocol.messages.types import ClientMessage

__all__ = ["directory"]


def answer(message: ClientMessage, tensors: Sequence[bytes]) -> Iterable[list[Any]]:
    """Echo the tensors; every model is ready except `loading`."""
    if isinstance(message, (ServerReady, ModelReady)):
        ready = getattr(message, "model_name", "") != "loading"
        return [encode(ReadyResponse(message.id, ready, "" if ready else "loading: attaching 0/4"))]
    return fakedaemon.echo(message, tensors)


@pytest.fixture
def fake(directory: str) -> Iterator[FakeDaemon]:
    """Return a fake daemon that echoes every request until a test changes its handler."""
    fake = FakeDaemon(f"unix://{directory}/d.sock", answer)
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    """Return a gateway and its fake daemon, shared by all tests of a module that change neither."""
    fake = FakeDaemon(f"unix://{tmp_path_factory.mktemp('d')}/d.sock", answer)
    with HttpGateway(fake.address, {"gateway": {"max_body_bytes": 2**20}}) as gateway:
        yield gateway
    fake.stop()
