"""Fixture: an HTTP gateway connected to a daemon that echoes."""

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
    """Echo; every model is ready but one that is called loading."""
    if isinstance(message, (ServerReady, ModelReady)):
        ready = getattr(message, "model_name", "") != "loading"
        return [encode(ReadyResponse(message.id, ready, "" if ready else "loading: attaching 0/4"))]
    return fakedaemon.echo(message, tensors)


@pytest.fixture
def fake(directory: str) -> Iterator[FakeDaemon]:
    """A daemon that echoes whatever it is asked, until it is told otherwise."""
    fake = FakeDaemon(f"unix://{directory}/d.sock", answer)
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpGateway]:
    """A gateway before such a daemon: one for all tests of a module that leave both as they are."""
    fake = FakeDaemon(f"unix://{tmp_path_factory.mktemp('d')}/d.sock", answer)
    with HttpGateway(fake.address, {"gateway": {"max_body_bytes": 2**20}}) as gateway:
        yield gateway
    fake.stop()
