"""The session of a worker whose engine runs several predicts at once.

All is as in any session (`model`), and done by the same thread, but that predicts are run by a `PredictThreads`: they
begin in the order in which they came, and each is answered as soon as it has ended. Any other order waits until all
that came before it has been answered, and what comes after it waits for it. So memory is not taken away that a predict
may use, and a worker stops when it has answered. A predict that spoils the model ends the process when the others have
ended; that it leaves is the last that is heard of it.
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
    """Serves one engine over one connection: as many predicts at once as the engine runs. The same arguments."""

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
        # What was fatal, of which the last one is told last.
        self._fatal_failures: List[PredictFailed] = []
        self._is_failure_undelivered = False
        connection.watch(self._threads.descriptor)

    def run(self, sha256: str) -> int:
        """As that of a session."""
        status = super().run(sha256)
        if self._threads.exit_status == exit_codes.OK:
            return status
        self._status = self._threads.exit_status
        while not self._is_failure_undelivered and not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    def _next_order(self) -> Entry:
        """Have the threads run what comes; return another order in its turn, and a `Stop` where no more is run."""
        if self._status != exit_codes.OK:
            return super()._next_order()
        while True:
            self._send_results()
            if self._threads.exit_status != exit_codes.OK and self._threads.is_idle:
                return _STOP
            self._reshare_weights()
            # What has come meanwhile is read first, as in any session.
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
        """As in any session. What the threads have reported was read, but it may wake this thread for that only now."""
        if self._status == exit_codes.OK:
            super()._on_idle()
        else:
            self._threads.take_results()

    def _reshare_weights(self) -> None:
        """Share the weights of a model that was built again, once no predict runs. None begins before that."""
        if self._engine.has_unshared_weights and self._threads.is_idle:
            self._engine.reshare_weights()

    def _can_run_next(self) -> bool:
        """Whether it is the turn of the first in the inbox."""
        if not self._inbox:
            return False
        if isinstance(self._inbox.first, (Predict, BeginBatch)) and not self._engine.has_unshared_weights:
            return self._threads.has_free_thread
        return self._threads.is_idle

    def _is_idle(self) -> bool:
        """Whether nothing was heard that is still to be answered, and nothing will be."""
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
            # After the last one this process has no slot any more, and nobody hears.
            for failed in self._fatal_failures[:-1]:
                self._reply((dataclasses.replace(failed, is_exiting=False), ()))
            self._reply((self._fatal_failures.pop(), ()))
            self._fatal_failures.clear()
        if results and time.monotonic() >= self._next_housekeeping_at:
            self._do_housekeeping()

    def _on_reconnect(self) -> None:
        """Another daemon is there, which has asked nothing yet, and has given no memory."""
        self._threads.wait_idle()
        self._fatal_failures.clear()
        if self._threads.exit_status != exit_codes.OK:
            # Nobody has heard the bad news: that the process ends tells it.
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
