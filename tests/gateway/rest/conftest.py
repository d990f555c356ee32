"""A gateway over HTTP before a daemon that echoes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.fakedaemon import FakeDaemon, directory
from testkit.httpgateway import HttpGateway

__all__ = ["directory"]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    """A daemon that echoes whatever it is asked."""
    fake = FakeDaemon(f"unix://{tmp_path_factory.mktemp('d')}/d.sock")
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def echo(fake: FakeDaemon) -> Iterator[HttpGateway]:
    """A gateway before it: one for all tests of a module that leave it as it is."""
    with HttpGateway(fake.address) as gateway:
        yield gateway
