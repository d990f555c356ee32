"""Taking a request back."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, echo, silent
from weightd import Client
from weightd_protocol.codec import encode
from weightd_protocol.errors import Cancelled, Unavailable
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

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


def test_a_read_goes_on_in_the_middle_of_which_something_is_taken_back(client: Client, daemon: FakeDaemon) -> None:
    """As the collector of garbage does with what a `map` has left."""
    daemon.handle = lambda message, tensors: [] if isinstance(message, Cancel) else echo(message, tensors)
    pending = client.submit("echo", {"x": X})
    connection = client._session.connection  # pyright: ignore[reportPrivateUsage]
    readers = client._transport._election.reader  # pyright: ignore[reportPrivateUsage]
    receive, send = connection.receive, connection.send

    def stuck(frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        return False

    def collecting() -> List[Any]:
        connection.receive = receive  # type: ignore[method-assign]
        connection.send = stuck
        connection.get_sent_target = lambda: 1 << 30  # type: ignore[method-assign]
        before = dict(readers)
        pending.cancel()
        connection.send = send
        assert readers == before, "another one may read beside this one"
        return receive()

    connection.receive = collecting  # type: ignore[method-assign]
    assert client.infer("echo", {"x": X})


def test_what_is_taken_back_in_the_middle_of_a_message_goes_after_it(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, tensors: [] if isinstance(message, Cancel) else echo(message, tensors)
    pending = client.submit("echo", {"x": X})
    connection = client._session.connection  # pyright: ignore[reportPrivateUsage]
    send = connection.send

    def collecting(frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        connection.send = send
        pending.cancel()
        return send(frames, descriptors)

    connection.send = collecting
    assert client.infer("echo", {"x": X})
    assert [type(daemon.next()[0]) for _ in range(3)] == [Infer, Infer, Cancel]
