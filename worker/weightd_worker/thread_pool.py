"""Threads that run predicts beside each other, each one after another."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from typing import Any, Callable, Deque, List, Optional, Set, Tuple

from weightd_worker import exit_codes
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.predictor import Reply

_READ_BYTES = 4096


class PredictThreads:
    """Runs as many predicts at once as it has members; what they tell is heard in the thread that has begun them.

    One of them at a time does anything else but compute (`UnlockedEngine`): what they share needs no care.

    Args:
        thread_count: how many members; each is made when it is first needed.

    Attributes:
        exit_status: with which the process is to end, as a predict has returned it; else OK.
        descriptor: can be read when there is something to hear.
    """

    def __init__(self, thread_count: int) -> None:
        self.exit_status = exit_codes.OK
        self.descriptor, self._wake_fd = os.pipe()
        os.set_blocking(self.descriptor, False)
        self.lock = threading.Lock()
        self.thread_ids: Set[int] = set()
        self._max_threads = thread_count
        self._started_threads = 0
        self._unfinished = 0
        self._queue: queue.SimpleQueue[Callable[[], int]] = queue.SimpleQueue()
        self._events: Deque[Tuple[Optional[Reply], int, Optional[BaseException]]] = collections.deque()
        self._is_woken = False

    @property
    def has_free_thread(self) -> bool:
        """Whether a predict would begin at once, and may."""
        return self._unfinished < self._max_threads and self.exit_status == exit_codes.OK

    @property
    def is_idle(self) -> bool:
        """Whether every predict has ended, and all was heard that came of it."""
        return not self._unfinished

    def submit(self, predict: Callable[[], int]) -> None:
        """Have a member that is free run a predict, which returns what `exit_status` may become."""
        self._unfinished += 1
        if self._unfinished > self._started_threads:
            self._started_threads += 1
            # The end of the process waits for none of them.
            threading.Thread(target=self._run_thread, daemon=True).start()
        self._queue.put(predict)

    def report(self, *results: Reply) -> None:
        """Say something of the predict that this member runs."""
        for each in results:
            self._post(each)

    def take_results(self) -> List[Reply]:
        """Return what was told since.

        Raises:
            BaseException: a predict has ended in it.
        """
        # In this order: whatever is said after it was read wakes again, or is heard now.
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, _READ_BYTES)
        self._is_woken = False
        results: List[Reply] = []
        while self._events:
            result, status, error = self._events.popleft()
            if result is not None:
                results.append(result)
                continue
            self._unfinished -= 1
            self.exit_status = self.exit_status or status
            if error is not None:
                raise error
        return results

    def wait_idle(self) -> None:
        """Wait until it is idle; what was told is of no use any more."""
        waiting = threading.Event()
        while not self.is_idle:
            self.take_results()
            # Nothing is to be read meanwhile, and it does not matter how soon this ends.
            waiting.wait(0.001)

    def _run_thread(self) -> None:
        self.thread_ids.add(threading.get_ident())
        while True:
            predict = self._queue.get()
            status, error = exit_codes.OK, None
            try:
                with self.lock:
                    status = predict()
            except BaseException as raised:  # noqa: BLE001 - raised again where it is heard
                error = raised
            # It has tensors, and the next wait may be long.
            del predict
            self._post(None, status, error)

    def _post(
        self, result: Optional[Reply], exit_status: int = exit_codes.OK, error: Optional[BaseException] = None
    ) -> None:
        self._events.append((result, exit_status, error))
        if not self._is_woken:
            self._is_woken = True
            os.write(self._wake_fd, b"\0")


class UnlockedEngine:
    """An engine, which these threads have compute while others go on."""

    def __init__(self, engine: Engine, threads: PredictThreads) -> None:
        self._engine = engine
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def predict(self, inputs: Arrays) -> Arrays:
        """As that of the engine."""
        if threading.get_ident() not in self._threads.thread_ids:
            return self._engine.predict(inputs)
        self._threads.lock.release()
        try:
            return self._engine.predict(inputs)
        finally:
            self._threads.lock.acquire()
