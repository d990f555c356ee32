"""Timing of requests in short alternating rounds, so that disturbances of the machine affect all sides alike."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from benchmarks.material import Arrays, Reference

if TYPE_CHECKING:
    from typing import Self  # Python 3.10 lacks it

# Sends one request: takes its inputs, returns its outputs.
Ask = Callable[[Arrays], Arrays]
Connect = Callable[[], AbstractContextManager[Ask]]

Input = TypeVar("Input")
Output = TypeVar("Output")


def warm_up(count: int) -> int:
    """Return the number of requests before a round of `count`, until caches and cores have adapted to this side."""
    return count // 10 + 1


def seconds_of(
    ask: Callable[[Input], Output],
    inputs: Sequence[Input],
    count: int,
    check: Callable[[int, Output], None] | None = None,
) -> list[float]:
    """Return the seconds of each of `count` requests, one after another, without the checks between them.

    The round begins with `warm_up` more requests that do not count.
    """
    seconds: list[float] = []
    more = warm_up(count)
    for index in range(more + count):
        inputs_of_request = inputs[index % len(inputs)]
        begin = time.perf_counter()
        answer = ask(inputs_of_request)
        seconds.append(time.perf_counter() - begin)
        if check is not None:
            check(index, answer)
    return seconds[more:]


class BackgroundThread:
    """A thread that runs until the block ends; its error is raised there. Subclasses implement `_run`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run_guarded)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        """Work until `_stop` is set."""
        raise NotImplementedError

    def _run_guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the block
            self._failure = error


class Threads:
    """Threads of this process, each with a separate connection and one request at a time.

    Args:
        connect: creates a connection; called in its thread.
        inputs: the inputs of the requests, used in turn.
        count: number of threads.
    """

    def __init__(
        self, connect: Callable[[], AbstractContextManager[Ask]], inputs: Sequence[Arrays], count: int
    ) -> None:
        self._connect = connect
        self._inputs = inputs
        self._connected = threading.Barrier(count + 1)
        self._stop = False
        self._answers: list[list[tuple[int, Arrays]]] = [[] for _ in range(count)]
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(answers,)) for answers in self._answers]

    def requests_per_second(self, seconds: float, reference: Reference) -> float:
        """Send requests for `seconds`; check the answers afterwards."""
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            self._connected.wait()
        begin = time.perf_counter()
        time.sleep(seconds)
        self._stop = True
        for thread in self._threads:
            thread.join()
        took = time.perf_counter() - begin
        for failure in self._failures:
            raise failure
        for answers in self._answers:
            for index, answer in answers:
                reference.check(index, answer)
        return sum(map(len, self._answers)) / took

    def _run(self, answers: list[tuple[int, Arrays]]) -> None:
        inputs = self._inputs
        try:
            with self._connect() as ask:
                ask(inputs[0])
                self._connected.wait()
                while not self._stop:
                    index = len(answers)
                    answers.append((index, ask(inputs[index % len(inputs)])))
        except threading.BrokenBarrierError:
            pass  # another thread has failed, and its error is reported
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self._failures.append(error)
            self._connected.abort()
