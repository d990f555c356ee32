"""Tests without `select.poll`, which eventlet's `monkey_patch` removes."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator, List

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, silent
from weightd import Client, DeadlineExceeded
from weightd.pending import PendingCall
from weightd.polling import READ, WRITE, SelectPoller, new_poller
from weightd.reader_election import ReaderElection
from weightd_protocol.messages.control import ReadyResponse

# Above 64 KiB, where ZeroMQ frames are not copied.
LARGE = np.arange(100_000, dtype=np.float32)


@pytest.fixture
def pair() -> Iterator[List[socket.socket]]:
    ends = socket.socketpair()
    yield [*ends]
    for end in ends:
        end.close()


def found(poller: Any, milliseconds: float) -> List[Any]:
    return sorted(poller.poll(milliseconds))


@pytest.mark.parametrize("wait", [0, 1])
def test_select_poller_equals_poll(monkeypatch: pytest.MonkeyPatch, pair: List[socket.socket], wait: int) -> None:
    if not wait:
        # eventlet's select rejects a descriptor for which a green thread waits.
        monkeypatch.delattr(select, "select")
    near, far = pair
    both: List[Any] = [select.poll(), SelectPoller()]
    for poller in both:
        poller.register(near.fileno(), READ)
    assert [found(poller, wait) for poller in both] == [[], []]
    far.send(b"!")
    assert [found(poller, wait) for poller in both] == [[(near.fileno(), READ)]] * 2
    for poller in both:
        poller.modify(near.fileno(), WRITE)
    assert [found(poller, wait) for poller in both] == [[(near.fileno(), WRITE)]] * 2
    both[1].modify(near.fileno(), READ | WRITE)
    assert found(both[1], wait) == [(near.fileno(), READ), (near.fileno(), WRITE)]


def test_prefers_poll_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(new_poller(()), SelectPoller)
    monkeypatch.delattr(select, "poll")
    assert isinstance(new_poller(()), SelectPoller)


def test_client_works_without_poll(monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon) -> None:
    monkeypatch.delattr(select, "poll")
    with Client(daemon.address, timeout=LIMIT_S) as client, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda n: client.infer("m", {"x": LARGE + n})["x"][0], range(32))
        assert [*answers] == [*range(32)]
        assert [outputs["x"].size for outputs in client.map("m", [{"x": LARGE}] * 40)] == [LARGE.size] * 40
        daemon.handle = silent
        assert not client.submit("m", {"x": LARGE}).done()
        with pytest.raises(DeadlineExceeded):
            client.infer("m", {"x": LARGE}, timeout=0.1)
        daemon.handle = echo
        assert client.server().version == "9.9"


def test_starts_no_thread_for_uncopied_frames(daemon: FakeDaemon) -> None:
    """As a green thread, it would stop the whole program."""
    program = f"""
import select, threading
del select.poll
import numpy as np
from weightd import Client
with Client({daemon.address!r}) as client:
    client.infer("m", {{"x": np.zeros(100_000)}})
    print(threading.active_count())
"""
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert printed.stdout == "1\n"


def test_uses_current_get_ident(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent and eventlet may replace `get_ident` after the client was imported."""
    green = 1
    monkeypatch.setattr(threading, "get_ident", lambda: green)
    turns = ReaderElection()
    assert turns.try_read()
    green = 2
    assert not turns.try_read()
    turn = turns.join(PendingCall("1", ReadyResponse))
    assert turn is not None
