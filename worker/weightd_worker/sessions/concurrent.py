"""Session of a worker whose engine runs several predicts at once.

One thread executes the daemon's orders, as in any session (`model`), but the thread pool `PredictThreads` runs the
predicts. Predicts begin in the order of arrival, and each result is sent as soon as the predict ends.

Any other order is executed only after the results of all earlier predicts have been sent, and later predicts begin only
after this order. So no shared memory is unmapped while a predict may use it, and a worker sends all results before it
stops.

After a predict has corrupted the model, no other predict begins. When all running predicts have ended, the process
reports that it exits, and sends nothing more.
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

from weightd_protocol.messages.regions import UnmapRegion
from weightd_protocol.messages.worker import BeginBatch, Predict, PredictFailed, Reconnected, Stop
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
    """Session of a worker that runs up to `engine.concurrency` predicts at once.

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
        # Replies to requests whose failure makes this process exit. They are sent when all predicts have ended.
        self._fatal_failures: List[PredictFailed] = []
        self._is_failure_undelivered = False
        connection.watch(self._threads.descriptor)

    def run(self, sha256: str) -> int:
        """Execute orders as `Session.run` does. After a fatal failure of a predict, wait for the daemon's Stop."""
        status = super().run(sha256)
        if self._threads.exit_status == exit_codes.OK:
            return status
        self._status = self._threads.exit_status
        while not self._is_failure_undelivered and not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    def _next_order(self) -> Entry:
        """Pass queued predicts to the threads until another order is next, and return this order.

        After a fatal failure, return Stop when all predicts have ended.
        """
        if self._status != exit_codes.OK:
            return super()._next_order()
        while True:
            self._send_results()
            if self._threads.exit_status != exit_codes.OK and self._threads.is_idle:
                return _STOP
            self._reshare_weights()
            # Read all received messages first, so that a CancelPredict takes effect before its Predict begins.
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
        """Called when no message has arrived for a while, or when the pipe of the threads is readable.

        While the process exits, only drain the pipe, so that it does not wake this thread again.
        """
        if self._status == exit_codes.OK:
            super()._on_idle()
        else:
            self._threads.take_results()

    def _reshare_weights(self) -> None:
        """Share the weights of a model that was built again, if no predict is running.

        Until the weights are shared, no further predict begins (`_can_run_next`).
        """
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
        """Return whether no predict is running and no order is queued."""
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
            # Set `is_exiting` only in the last reply, because the daemon removes the slot of this process when it reads
            # `is_exiting`.
            for failed in self._fatal_failures[:-1]:
                self._reply((dataclasses.replace(failed, is_exiting=False), ()))
            self._reply((self._fatal_failures.pop(), ()))
            self._fatal_failures.clear()
        if results and time.monotonic() >= self._next_housekeeping_at:
            self._do_housekeeping()

    def _on_reconnect(self) -> None:
        """Wait until no predict is running, drop the previous daemon's requests and regions, and report to the new one.

        After a fatal failure, do not report: the process exits.
        """
        self._threads.wait_idle()
        self._fatal_failures.clear()
        if self._threads.exit_status != exit_codes.OK:
            # No daemon has received the failed replies. The new daemon will notice that this process exits.
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
    """Thread pool that runs predicts. The session's thread submits predicts and takes their results.

    Only the engine runs in parallel. The rest of a predict's code holds a lock, which `UnlockedEngine` releases around
    the engine's predict. So the threads can share objects without further locks.

    Args:
        thread_count: the number of threads. Each thread is started when it is first needed.

    Attributes:
        exit_status: the exit status that a predict has returned because the process must exit; otherwise OK.
        descriptor: a file descriptor that is readable when results can be taken.
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
        """Whether a thread is free for another predict. Always False after a fatal failure."""
        return self._unfinished < self._max_threads and self.exit_status == exit_codes.OK

    @property
    def is_idle(self) -> bool:
        """Whether all submitted predicts have ended and all their results have been taken."""
        return not self._unfinished

    def submit(self, predict: Callable[[], int]) -> None:
        """Run a predict in a free thread. The predict returns OK, or an exit status if the process must exit."""
        self._unfinished += 1
        if self._unfinished > self._started_threads:
            self._started_threads += 1
            # Start a daemon thread, so that the interpreter does not wait for it when the process exits.
            threading.Thread(target=self._run_thread, daemon=True).start()
        self._queue.put(predict)

    def report(self, *results: Reply) -> None:
        """Pass results of the predict that runs in the calling thread to the session's thread."""
        for each in results:
            self._post(each)

    def take_results(self) -> List[Reply]:
        """Return the results that predicts have passed to `report` since the last call.

        Raises:
            BaseException: an exception that a predict has raised.
        """
        # Read the pipe before the events. Then an event that is added after the read either makes the pipe readable
        # again, or is taken below.
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
        """Wait until all predicts have ended, and drop their results."""
        waiting = threading.Event()
        while not self.is_idle:
            self.take_results()
            # A short delay between two checks does not matter, because the results are dropped.
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
            # Free the tensors of this predict now, because it may take long until the next predict arrives.
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
    """Wrapper of an engine that releases the lock of the `PredictThreads` while the engine runs a predict."""

    def __init__(self, engine: Engine, threads: PredictThreads) -> None:
        self._engine = engine
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model.

        If one of the pool's threads calls this method, release the lock of `PredictThreads` while the engine runs.
        """
        if threading.get_ident() not in self._threads.thread_ids:
            return self._engine.predict(inputs)
        self._threads.lock.release()
        try:
            return self._engine.predict(inputs)
        finally:
            self._threads.lock.acquire()
