"""A close that waits for somebody holds nobody up."""

from __future__ import annotations

import os
import threading

import pytest

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
