"""The life of a worker whose engine runs several predicts at once.

All is as in any session (`session`), and done by the same thread, but that predicts are run by a `Crew`: they begin in
the order in which they came, and each is answered as soon as it has ended. Any other order waits until all that came
before it has been answered, and what comes after it waits for it. So memory is not taken away that a predict may use,
and a worker stops when it has answered. A predict that spoils the model ends the process when the others have ended;
that it leaves is the last that is heard of it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, List, Union, cast

from weightd.protocol.messages.children import Back, Failed, Predict, Stop, Together, Unmap
from weightd.worker import exits
from weightd.worker.connection import Connection
from weightd.worker.crew import Crew, Unlocked
from weightd.worker.engines.engine import Engine
from weightd.worker.inbox import Entry, Inbox
from weightd.worker.lane import LaneConnection
from weightd.worker.predictor import Predictor, Told
from weightd.worker.session import Files, Session

_END: Entry = (Stop(), ())


class ConcurrentSession(Session):
    """Serves one engine over one connection: as many predicts at once as the engine runs. The same arguments."""

    def __init__(
        self, connection: Union[Connection, LaneConnection], engine: Engine, files: Files, *more: Any, **settings: Any
    ) -> None:
        super().__init__(connection, engine, files, *more, **settings)
        self._crew = Crew(engine.concurrency)
        self._predictor = Predictor(cast(Engine, Unlocked(engine, self._crew)), self._crew.tell)
        # What was fatal, of which the last one is told last.
        self._fatal: List[Failed] = []
        self._is_unheard = False
        connection.watch(self._crew.descriptor)

    def run(self, sha256: str) -> int:
        """As that of a session."""
        status = super().run(sha256)
        if self._crew.status == exits.OK:
            return status
        self._status = self._crew.status
        while not self._is_unheard and not isinstance(self._next()[0], Stop):
            pass
        return self._status

    def _next(self) -> Entry:
        """Have the crew run what comes; return another order when it is its turn, and a `Stop` where no more is run."""
        if self._status != exits.OK:
            return super()._next()
        while True:
            self._answer_heard()
            if self._crew.status != exits.OK and self._crew.is_idle:
                return _END
            self._share_again()
            # What has come meanwhile is read first, as in any session.
            can_go_on = self._can_go_on()
            messages = self._connection.receive(0 if can_go_on else self._patience_s)
            if messages:
                self._take(messages)
            elif messages is None:
                self._follow()
            elif not can_go_on and self._is_quiet():
                self._when_quiet()
            if self._can_go_on():
                order, tensors = self._inbox.take()
                if isinstance(order, Predict):
                    self._crew.begin(functools.partial(self._predictor.predict, order, tensors))
                elif isinstance(order, Together):
                    self._crew.begin(functools.partial(self._predictor.together, tensors, order.rows, order.parties))
                else:
                    return order, tensors

    def _when_quiet(self) -> None:
        """As in any session. What the crew has said was heard, but it may wake this thread for that only now."""
        if self._status == exits.OK:
            super()._when_quiet()
        else:
            self._crew.hear()

    def _share_again(self) -> None:
        """Share the weights of a model that was built again, once no predict runs. None begins before that."""
        if self._engine.is_apart and self._crew.is_idle:
            self._engine.share_again()

    def _can_go_on(self) -> bool:
        """Whether it is the turn of the first in the inbox."""
        if not self._inbox:
            return False
        if isinstance(self._inbox.first, (Predict, Together)) and not self._engine.is_apart:
            return self._crew.is_free
        return self._crew.is_idle

    def _is_quiet(self) -> bool:
        """Whether nothing was heard that is still to be answered, and nothing will be."""
        return self._crew.is_idle and not self._inbox

    def _answer_heard(self) -> None:
        heard = self._crew.hear()
        good: List[Told] = []
        for told in heard:
            if isinstance(told[0], Failed) and told[0].leaving:
                self._fatal.append(told[0])
            else:
                good.append(told)
        if good:
            self._answer(*good)
        if self._crew.is_idle and self._fatal:
            # After the last one this process has no seat any more, and nobody hears.
            for failed in self._fatal[:-1]:
                self._answer((dataclasses.replace(failed, leaving=False), ()))
            self._answer((self._fatal.pop(), ()))
            self._fatal.clear()
        if heard and time.monotonic() >= self._tidy_at:
            self._tidy()

    def _follow(self) -> None:
        """Another daemon is there, which has asked nothing yet, and has given no memory."""
        self._crew.wait()
        self._fatal.clear()
        if self._crew.status != exits.OK:
            # Nobody has heard the bad news: that the process ends tells it.
            self._is_unheard = True
            return
        waiting, self._inbox = self._inbox, Inbox()
        while waiting:
            order, _ = waiting.take()
            if not isinstance(order, (Predict, Together, Unmap)):
                self._inbox.put(order)
        self._predictor.regions.clear()
        self._send(Back())
