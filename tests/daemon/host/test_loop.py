from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from weightd.daemon.host.loop import Loop, signals


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.read = b""

    def write(self, content: bytes = b"x") -> None:
        os.write(self.writer, content)

    def on_readable(self) -> None:
        self.read += os.read(self.reader, 64)

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipes() -> Iterator[list[Pipe]]:
    made = [Pipe() for _ in range(3)]
    yield made
    for pipe in made:
        pipe.close()


def looped(*pipes: Pipe) -> Loop:
    loop = Loop()
    for pipe in pipes:
        loop.add(pipe.reader, pipe.on_readable)
    return loop


# --- waiting --------------------------------------------------------------------------------------------------------


def test_who_is_readable_is_called_and_nobody_else(pipes: list[Pipe]) -> None:
    loop = looped(*pipes)
    pipes[0].write(b"a")
    pipes[2].write(b"c")
    loop.wait(60.0)
    assert [pipe.read for pipe in pipes] == [b"a", b"", b"c"]


def test_who_is_still_readable_is_called_again(pipes: list[Pipe]) -> None:
    loop = looped(pipes[0])
    pipes[0].write(b"x" * 100)
    loop.wait(60.0)
    loop.wait(60.0)
    assert len(pipes[0].read) == 100


def test_sockets_and_descriptors_are_waited_for_together(pipes: list[Pipe]) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://loop")
        theirs.connect("inproc://loop")
        received: list[bytes] = []
        loop = looped(pipes[0])
        loop.add(ours, lambda: received.append(ours.recv()))
        theirs.send(b"hello")
        loop.wait(60.0)
        assert (received, pipes[0].read) == ([b"hello"], b"")
        pipes[0].write()
        loop.wait(60.0)
        assert (received, pipes[0].read) == ([b"hello"], b"x")


def test_who_is_removed_is_not_called(pipes: list[Pipe]) -> None:
    loop = looped(pipes[0])
    pipes[0].write()
    loop.remove(pipes[0].reader)
    loop.wait(0.0)
    assert pipes[0].read == b""


def test_a_handler_may_remove_who_is_next(pipes: list[Pipe]) -> None:
    loop = Loop()
    called: list[int] = []

    def only(index: int) -> Callable[[], None]:
        def handler() -> None:
            called.append(index)
            for pipe in pipes:
                loop.remove(pipe.reader)

        return handler

    for index, pipe in enumerate(pipes):
        loop.add(pipe.reader, only(index))
        pipe.write()
    loop.wait(60.0)
    assert len(called) == 1
    loop.wait(0.0)
    assert len(called) == 1


@pytest.mark.parametrize("seconds", [-1.0, -float("inf"), 0.0])
def test_what_is_due_is_not_waited_for(pipes: list[Pipe], seconds: float) -> None:
    begin = time.monotonic()
    looped(*pipes).wait(seconds)
    assert time.monotonic() - begin < 5.0


@pytest.mark.parametrize("seconds", [0.0009, 0.0019])
def test_a_wait_never_ends_early(pipes: list[Pipe], seconds: float) -> None:
    begin = time.monotonic()
    looped(*pipes).wait(seconds)
    assert time.monotonic() - begin >= seconds


def test_an_endless_wait_ends_with_the_first_event(pipes: list[Pipe]) -> None:
    pipes[1].write()
    looped(*pipes).wait(float("inf"))
    assert pipes[1].read == b"x"


# --- signals --------------------------------------------------------------------------------------------------------

USED = [signal.SIGUSR1, signal.SIGUSR2]


def test_signals_are_bytes_to_read() -> None:
    loop, seen = Loop(), bytearray()
    with signals(USED) as wakeups:
        loop.add(wakeups, lambda: seen.extend(os.read(wakeups, 64)))
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.wait(60.0)
        assert seen == bytes([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        loop.wait(60.0)
        assert seen[1:] == bytes([signal.SIGUSR2, signal.SIGUSR1])


def test_more_signals_than_the_pipe_holds_are_no_error() -> None:
    with signals(USED) as wakeups:
        os.set_blocking(wakeups, True)
        for _ in range(70_000):
            signal.raise_signal(signal.SIGUSR1)
        assert os.read(wakeups, 1) == bytes([signal.SIGUSR1])


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in USED]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _fail_after_a_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)
    raise ZeroDivisionError


def test_what_was_before_is_there_again() -> None:
    calls: list[int] = []
    mine = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        gc.collect()  # loops of other tests have descriptors too
        before, descriptors = _handlers(), _descriptors()
        with pytest.raises(ZeroDivisionError), signals(USED):
            _fail_after_a_signal()
        assert _handlers() == before
        assert calls == []
        signal.raise_signal(signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
        assert signal.set_wakeup_fd(-1) == -1
        assert _descriptors() == descriptors
    finally:
        signal.signal(signal.SIGUSR1, mine)


def test_an_outer_block_goes_on_after_an_inner_one() -> None:
    with signals(USED) as outer:
        with signals(USED) as inner:
            signal.raise_signal(signal.SIGUSR1)
            assert os.read(inner, 64) == bytes([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR2)
        assert os.read(outer, 64) == bytes([signal.SIGUSR2])
