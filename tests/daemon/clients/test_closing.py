"""A close that waits for somebody holds nobody up."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest

from testkit.waiting import until
from weightd.daemon.clients.closing import Closing


def test_what_hangs_holds_up_only_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, closed, really = threading.Event(), threading.Semaphore(0), os.close

    def close(descriptor: int) -> None:
        hangs.wait()
        really(descriptor)
        closed.release()

    monkeypatch.setattr("weightd.daemon.clients.closing.os.close", close)
    closing = Closing()

    def is_behind() -> bool:
        return closing.is_behind

    descriptors = [os.dup(0) for _ in range(64)]
    for descriptor in descriptors[1:]:
        closing.close(descriptor)
    assert not is_behind()
    closing.close(descriptors[0])
    assert is_behind()
    hangs.set()
    for _ in descriptors:
        assert closed.acquire(timeout=10)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
    closing.close(os.dup(0))
    assert closed.acquire(timeout=10)


def test_without_a_thread_descriptors_wait_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    closing = Closing()
    descriptors = [os.dup(0) for _ in range(64)]
    with monkeypatch.context() as patched:
        patched.setattr("weightd.daemon.clients.closing.threading.Thread.start", refused)
        for descriptor in descriptors:
            closing.close(descriptor)
        assert closing.is_behind
    assert caplog.text.count("the limit of processes and threads is reached") == 1
    # Nobody closes another one: who looks whether it is behind has the thread started.
    assert closing.is_behind
    until(lambda: not closing.is_behind, "they are closed")
    for descriptor in descriptors[:1]:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)
