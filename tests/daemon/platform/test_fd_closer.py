"""Descriptors that are slow to close, or fail to, block only the user who sent them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from testkit.lingering import lingering
from testkit.waiting import until
from weightd_daemon.platform import fd_closer as closing_module
from weightd_daemon.platform.fd_closer import INTERRUPT, MAX_PENDING, DescriptorCloser
from weightd_daemon.platform.log_setup import log_resource_error


@pytest.fixture(autouse=True)
def _threads_end_quickly(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(closing_module, "_IDLE_TIMEOUT_S", 0.01)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_slow_close_blocks_only_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, really = threading.Event(), os.close

    def close(descriptor: int) -> None:
        if descriptor == waits:
            goes_on.wait()
        really(descriptor)

    monkeypatch.setattr("weightd_daemon.platform.fd_closer.os.close", close)
    closing = DescriptorCloser(print)
    waits, *behind = (os.dup(0) for _ in range(64))
    closing.close("a", waits)
    for descriptor in behind[1:]:
        closing.close("a", descriptor)
    assert not closing.is_backlogged("a")
    closing.close("a", behind[0])
    assert (closing.is_backlogged("a"), closing.is_backlogged("b")) == (True, False)
    of_another = os.dup(0)
    closing.close("b", of_another)
    until(lambda: not is_open(of_another), "the descriptor of another user is closed")
    assert closing.is_backlogged("a")
    goes_on.set()
    until(lambda: not any(map(is_open, (waits, *behind))), "all are closed")
    until(lambda: not closing.is_backlogged("a"), "no more descriptors wait")


def test_failed_close_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("weightd_daemon.platform.fd_closer.os.close", close)
    closing = DescriptorCloser(print)
    for descriptor in range(1000, 1200):
        closing.close("a", descriptor)
    until(lambda: closed == [*range(1000, 1200)], "all descriptors are closed")
    until(lambda: not closing.is_backlogged("a"), "no more descriptors wait")


@pytest.mark.parametrize("via", ["descriptor", "connection"])
def test_lingering_socket_does_not_block_the_caller(via: str) -> None:
    closing = DescriptorCloser(print)
    ours, theirs = lingering()
    begin = time.monotonic()
    if via == "descriptor":
        closing.close("a", ours.detach())
    else:
        # The lingering socket is in the data that the daemon has not read when it closes the connection.
        end, client = socket.socketpair()
        socket.send_fds(client, [b"x"], [ours.fileno()])
        ours.close()
        closing.close_socket("a", end)
        client.close()
    # The close takes 30 s, unless the peer closes first.
    assert time.monotonic() - begin < 3
    theirs.close()
    until(lambda: not closing.is_backlogged("a") and not _has_thread(), "the socket is closed")


def _has_thread() -> bool:
    return any(each.name == "closing" for each in threading.enumerate())


def test_keeps_descriptors_until_a_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    closing = DescriptorCloser(log_resource_error)
    descriptors = [os.dup(0) for _ in range(64)]
    with monkeypatch.context() as patched:
        patched.setattr("weightd_daemon.platform.fd_closer.threading.Thread.start", refused)
        for descriptor in descriptors:
            closing.close("a", descriptor)
        assert closing.is_backlogged("a")
    assert caplog.text.count("the limit of processes and threads is reached") == 1
    # Nothing else is closed; `is_backlogged` itself starts the thread.
    assert closing.is_backlogged("a")
    until(lambda: not closing.is_backlogged("a"), "all are closed")
    for descriptor in descriptors[:1]:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(descriptor)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    before = signal.signal(INTERRUPT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(INTERRUPT, before)


def unread(*descriptors: int) -> socket.socket:
    """Return a socket with unread data that carry these descriptors, and with a closed peer."""
    end, client = socket.socketpair()
    client.send(b"before")
    for descriptor in descriptors:
        socket.send_fds(client, [b"x"], [descriptor])
    client.close()
    return end


@pytest.mark.parametrize("via", ["descriptor", "connection"])
def test_interrupts_lingering_closes_of_the_same_user(via: str) -> None:
    closing = DescriptorCloser(print)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack, interruptible():
        for number in range(MAX_PENDING + 5):
            ours, theirs = lingering()
            stack.enter_context(theirs)
            if via == "descriptor":
                closing.close("a", ours.detach())
            else:
                end = unread(ours.fileno())
                ours.close()
                closing.close_socket("a", end)
            if number < MAX_PENDING - 1:
                assert not closing.is_backlogged("a")
            until(lambda: not closing.is_backlogged("a"), "an earlier close is interrupted")
        # Each close takes 30 s, unless the peer closes first.
        assert time.monotonic() - begin < 15
    until(lambda: not _has_thread(), "all are closed")


@pytest.mark.parametrize("sent", [[], [b"x"], [bytes(100_000), bytes(50_000)]], ids=len)
def test_closes_connection_without_descriptors_at_once(sent: Sequence[bytes]) -> None:
    end, client = socket.socketpair()
    for each in sent:
        client.send(each)
    number = end.fileno()
    DescriptorCloser(print).close_socket("a", end)
    assert not is_open(number)
    assert not _has_thread()
    with contextlib.suppress(ConnectionResetError):
        assert client.recv(1) == b""
    client.close()


def test_limits_threads_and_serves_waiting_users(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, really, stuck = threading.Event(), os.close, {os.dup(0), os.dup(0)}

    def close(descriptor: int) -> None:
        if descriptor in stuck:
            goes_on.wait()
        really(descriptor)

    monkeypatch.setattr("weightd_daemon.platform.fd_closer.os.close", close)
    monkeypatch.setattr("weightd_daemon.platform.fd_closer._MAX_THREADS", 2)
    closing = DescriptorCloser(print)
    waits = {f"user {number}": os.dup(0) for number in range(5)}
    for number, descriptor in enumerate([*stuck]):
        closing.close(f"stuck {number}", descriptor)
    for user, descriptor in waits.items():
        closing.close(user, descriptor)
    assert sum(each.name == "closing" for each in threading.enumerate()) == 2
    assert all(map(is_open, waits.values()))
    goes_on.set()
    until(lambda: not any(map(is_open, (*stuck, *waits.values()))), "all are closed")
    until(lambda: not _has_thread(), "the threads end")


def test_idle_thread_serves_the_next_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing_module, "_IDLE_TIMEOUT_S", 60.0)
    closing = DescriptorCloser(print)
    for number in range(5):
        descriptor = os.dup(0)
        closing.close(f"user {number}", descriptor)
        until(lambda: not is_open(descriptor), "the descriptor is closed")  # noqa: B023
        until(lambda: _idle(closing) == 1, "the thread is idle")
    [thread] = [each for each in threading.enumerate() if each.name == "closing"]
    monkeypatch.setattr(closing_module, "_IDLE_TIMEOUT_S", 0.01)
    closing.close("user 0", os.dup(0))
    until(lambda: not thread.is_alive(), "the thread ends")


def _idle(closing: DescriptorCloser) -> int:
    return len(vars(closing)["_idle_inboxes"])
