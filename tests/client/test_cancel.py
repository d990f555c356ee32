"""Taking a request back."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, echo, silent
from weightd.client import Client
from weightd.protocol.codec import encode
from weightd.protocol.errors import Cancelled, Unavailable
from weightd.protocol.messages.data import Cancel, Error, Infer
from weightd.protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def cancels(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
    return [encode(Error(message.id, "CANCELLED", "taken back"))] if isinstance(message, Cancel) else []


def test_a_request_that_is_taken_back_ends_in_cancelled(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = cancels
    pending = client.submit("m", {"x": X})
    other = client.submit("m", {"x": X})
    pending.cancel()
    with pytest.raises(Cancelled, match=r"^taken back$"):
        pending.result()
    assert not other.done()
    (infer, _), _, (cancel, _) = daemon.next(), daemon.next(), daemon.next()
    assert isinstance(infer, Infer)
    assert cancel == Cancel(infer.id)


def test_what_has_ended_is_not_taken_back(client: Client, daemon: FakeDaemon) -> None:
    pending = client.submit("echo", {"x": X})
    assert pending.result()
    pending.cancel()
    assert pending.result()
    daemon.next()
    assert client.infer("echo", {"x": X})
    assert isinstance(daemon.next()[0], Infer), "no cancel was sent"


def test_an_answer_that_was_on_its_way_counts(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("echo", {"x": X})
    message, tensors = daemon.next()
    pending.cancel()
    daemon.next()
    daemon.send(*echo(message, tensors)[0])
    assert np.array_equal(pending.result()["x"], X)


def test_taking_back_from_a_daemon_that_is_gone_ends_in_unavailable(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    pending = client.submit("m", {"x": X})
    daemon.next()
    daemon.stop()
    pending.cancel()
    with pytest.raises(Unavailable):
        pending.result()
