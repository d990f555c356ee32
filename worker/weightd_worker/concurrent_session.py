"""The life of a worker whose engine runs several predicts at once.

All is as in any session (`session`), and done by the same thread, but that predicts are run by a `PredictThreads`: they
begin in the order in which they came, and each is answered as soon as it has ended. Any other order waits until all
that came before it has been answered, and what comes after it waits for it. So memory is not taken away that a predict
may use, and a worker stops when it has answered. A predict that spoils the model ends the process when the others have
ended; that it leaves is the last that is heard of it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, List, Union, cast

from weightd_protocol.messages.worker import BeginBatch, Predict, PredictFailed, Reconnected, Stop, UnmapRegion
from weightd_worker import exit_codes
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.engine import Engine
from weightd_worker.inbox import Entry, Inbox
from weightd_worker.predictor import Predictor, Reply
from weightd_worker.session import ChildFiles, WorkerSession
from weightd_worker.thread_pool import PredictThreads, UnlockedEngine

_STOP: Entry = (Stop(), ())


class ConcurrentSession(WorkerSession):
    """Serves one engine over one connection: as many predicts at once as the engine runs. The same arguments."""

    def __init__(
        self,
        connection: Union[WorkerConnection, ChannelConnection],
        engine: Engine,
        files: ChildFiles,
        *more: Any,
        **settings: Any,
    ) -> None:
        super().__init__(connection, engine, files, *more, **settings)
        self._threads = PredictThreads(engine.concurrency)
        self._predictor = Predictor(cast(Engine, UnlockedEngine(engine, self._threads)), self._threads.report)
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
