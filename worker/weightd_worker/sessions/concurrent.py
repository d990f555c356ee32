"""Session of a worker whose engine runs several predicts at once.

One thread executes the orders, as in any session (`model`), but a `PredictThreads` runs the predicts. They begin in
order of arrival, and each is answered as soon as it ends. Any other order waits until all predicts before it have been
answered, and the orders after it wait for it: so no memory is unmapped while a predict may use it, and a worker replies
before it stops. After a predict that corrupts the model no other begins, and when the running ones have ended, the
process reports that it exits, and sends nothing more.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import queue
import threading
import time
from typing import Any, Callable, Deque, List, Optional, Set, Tuple, cast

from weightd_protocol.messages.worker import BeginBatch, Predict, PredictFailed, Reconnected, Stop, UnmapRegion
from weightd_worker import exit_codes
from weightd_worker.connection import Connection
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.predictor import Predictor, Reply
from weightd_worker.sessions.base import Entry, Inbox
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.model import WorkerSession

_STOP: Entry = (Stop(), ())
_READ_BYTES = 4096


class ConcurrentSession(WorkerSession):
    """Serves one engine over one connection, with up to `engine.concurrency` predicts at once.

    See `WorkerSession` for the arguments.
    """

    def __init__(
        self,
        connection: Connection,
        engine: Engine,
        model_inputs: ModelInputs,
        **settings: Any,
    ) -> None:
        self._threads = PredictThreads(engine.concurrency)
        predictor = Predictor(cast(Engine, UnlockedEngine(engine, self._threads)), self._threads.report)
        super().__init__(connection, engine, model_inputs, predictor=predictor, **settings)
        # Failures that end the process. They are sent when no predict runs any more.
        self._fatal_failures: List[PredictFailed] = []
        self._is_failure_undelivered = False
        connection.watch(self._threads.descriptor)

    def run(self, sha256: str) -> int:
        """Execute orders as `Session.run` does, and report a fatal failure before the process exits."""
        status = super().run(sha256)
        if self._threads.exit_status == exit_codes.OK:
            return status
        self._status = self._threads.exit_status
        while not self._is_failure_undelivered and not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    def _next_order(self) -> Entry:
        """Submit queued predicts to the threads, and return the next other order, or Stop after a fatal failure."""
        if self._status != exit_codes.OK:
            return super()._next_order()
        while True:
            self._send_results()
            if self._threads.exit_status != exit_codes.OK and self._threads.is_idle:
                return _STOP
            self._reshare_weights()
            # Received messages are read first, so that a CancelPredict overtakes its Predict.
            can_go_on = self._can_run_next()
            messages = self._connection.receive(0 if can_go_on else self._idle_timeout_s)
            if messages:
                self._on_messages(messages)
            elif messages is None:
                self._on_reconnect()
            elif not can_go_on and self._is_idle():
                self._on_idle()
            if self._can_run_next():
                order, tensors = self._inbox.take()
                if isinstance(order, Predict):
                    self._threads.submit(functools.partial(self._predictor.predict, order, tensors))
                elif isinstance(order, BeginBatch):
                    self._threads.submit(
                        functools.partial(self._predictor.predict_batch, tensors, order.rows, order.principal_ids)
                    )
                else:
                    return order, tensors

    def _on_idle(self) -> None:
        """Handle a timeout. When the process exits, drain the pipe, which may wake this thread after all results."""
        if self._status == exit_codes.OK:
            super()._on_idle()
        else:
            self._threads.take_results()

    def _reshare_weights(self) -> None:
        """Share the weights of a rebuilt model once no predict runs. No predict begins before that."""
        if self._engine.has_unshared_weights and self._threads.is_idle:
            self._engine.reshare_weights()

    def _can_run_next(self) -> bool:
        """Return whether the first order in the inbox may be executed now."""
        if not self._inbox:
            return False
        if isinstance(self._inbox.first, (Predict, BeginBatch)) and not self._engine.has_unshared_weights:
            return self._threads.has_free_thread
        return self._threads.is_idle

    def _is_idle(self) -> bool:
        """Return whether no predict runs and no order waits."""
        return self._threads.is_idle and not self._inbox

    def _send_results(self) -> None:
        results = self._threads.take_results()
        replies: List[Reply] = []
        for result in results:
            if isinstance(result[0], PredictFailed) and result[0].is_exiting:
                self._fatal_failures.append(result[0])
            else:
                replies.append(result)
        if replies:
            self._reply(*replies)
        if self._threads.is_idle and self._fatal_failures:
            # The daemon removes the slot of this process when it reads `is_exiting`, so only the last reply sets it.
            for failed in self._fatal_failures[:-1]:
                self._reply((dataclasses.replace(failed, is_exiting=False), ()))
            self._reply((self._fatal_failures.pop(), ()))
            self._fatal_failures.clear()
        if results and time.monotonic() >= self._next_housekeeping_at:
            self._do_housekeeping()

    def _on_reconnect(self) -> None:
        """Drop the requests and regions of the daemon before, and report to the new one when no predict runs."""
        self._threads.wait_idle()
        self._fatal_failures.clear()
        if self._threads.exit_status != exit_codes.OK:
            # No daemon has received the failure. The exit of the process shows it.
            self._is_failure_undelivered = True
            return
        pending, self._inbox = self._inbox, Inbox()
        while pending:
            order, _ = pending.take()
            if not isinstance(order, (Predict, BeginBatch, UnmapRegion)):
                self._inbox.put(order)
        self._predictor.regions.clear()
        self._send(Reconnected())


class PredictThreads:
    """Thread pool for predicts. The thread that submits them also reads their results.

    Only the engine computes in parallel. At all other times a thread holds the lock (`UnlockedEngine`), so the objects
    that the threads share are safe without further locks.

    Args:
        thread_count: the number of threads. Each is started when it is first needed.

    Attributes:
        exit_status: the status with which the process has to exit, as a predict has returned it; else OK.
        descriptor: readable when there are results.
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
        """Whether a submitted predict would begin at once. False after a fatal failure."""
        return self._unfinished < self._max_threads and self.exit_status == exit_codes.OK

    @property
    def is_idle(self) -> bool:
        """Whether every predict has ended and all results have been taken."""
        return not self._unfinished

    def submit(self, predict: Callable[[], int]) -> None:
        """Run a predict in a free thread. Its return value may become `exit_status`."""
        self._unfinished += 1
        if self._unfinished > self._started_threads:
            self._started_threads += 1
            # A daemon thread, so that the exit of the process does not wait for it.
            threading.Thread(target=self._run_thread, daemon=True).start()
        self._queue.put(predict)

    def report(self, *results: Reply) -> None:
        """Post results of the predict that runs in this thread."""
        for each in results:
            self._post(each)

    def take_results(self) -> List[Reply]:
        """Return the results posted since the last call.

        Raises:
            BaseException: a predict has raised it.
        """
        # The order matters: an event that is posted after the read wakes this thread again, or is taken below.
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
        """Wait until no predict runs, and drop the results."""
        waiting = threading.Event()
        while not self.is_idle:
            self.take_results()
            # The results are dropped, so a short delay does not matter.
            waiting.wait(0.001)

    def _run_thread(self) -> None:
        self.thread_ids.add(threading.get_ident())
        while True:
            predict = self._queue.get()
            status, error = exit_codes.OK, None
            try:
                with self.lock:
                    status = predict()
            except BaseException as raised:  # noqa: BLE001 - take_results raises it in the session's thread
                error = raised
            # The predict refers to tensors, and the next one may be long in coming.
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
    """Engine that releases the threads' lock while it computes."""

    def __init__(self, engine: Engine, threads: PredictThreads) -> None:
        self._engine = engine
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model. In one of the threads, release the lock meanwhile."""
        if threading.get_ident() not in self._threads.thread_ids:
            return self._engine.predict(inputs)
        self._threads.lock.release()
        try:
            return self._engine.predict(inputs)
        finally:
            self._threads.lock.acquire()
