"""Requests over direct channels: real sockets, with a fake daemon and workers that are played by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

from testkit.fakechannels import FakeChannel, FakeChannels, settle
from testkit.fakedaemon import FakeDaemon
from weightd import Client, Pending

X = {"x": np.arange(6, dtype=np.float32)}


@pytest.fixture
def address(directory: Path) -> str:
    return f"unix://{directory}/d.sock"


@pytest.fixture
def channels(daemon: FakeDaemon) -> Iterator[FakeChannels]:
    channels = FakeChannels(daemon)
    yield channels
    channels.close()


@pytest.fixture
def channel(channels: FakeChannels, client: Client) -> FakeChannel:
    return channels.open(client, X)


def submit(client: Client, value: float = 0.0, **options: Any) -> Pending:
    return client.submit("m", {"x": np.full(6, value, np.float32)}, **options)


def value_of(pending: Pending) -> float:
    return float(pending.result()["x"][0])


def test_second_request_of_a_description_takes_the_channel(client: Client, channels: FakeChannels) -> None:
    for _ in range(4):
        client.infer("m", X)
    settle(client)
    assert len(channels.granted) == 1
    assert len(channels.relayed) == 4
    client.infer("m", X)
    pending = submit(client, 7.0)
    request = channels.granted[0].take()
    channels.granted[0].answer(request)
    assert value_of(pending) == 7.0
    assert len(channels.relayed) == 5


def test_asks_with_the_request_after_the_third_answer(client: Client, channels: FakeChannels) -> None:
    client.infer("m", X)
    client.infer("m", X)
    settle(client)
    settle(client)
    client.infer("m", X)
    assert not channels.granted
    client.infer("other", X)
    settle(client)
    assert [each.model for each in channels.granted] == ["m"]
