"""Threads that run predicts beside each other, each one after another."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from typing import Any, Callable, Deque, List, Optional, Set, Tuple

from weightd.worker import exits
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.predictor import Told

_ENOUGH = 4096


class Crew:
    """Runs as many predicts at once as it has members; what they tell is heard in the thread that has begun them.

    One of them at a time does anything else but compute (`Unlocked`): what they share needs no care.

    Args:
        size: how many members; each is made when it is first needed.

    Attributes:
        status: with which the process is to end, as a predict has returned it; else OK.
        descriptor: can be read when there is something to hear.
    """

    def __init__(self, size: int) -> None:
        self.status = exits.OK
        self.descriptor, self._wake = os.pipe()
        os.set_blocking(self.descriptor, False)
        self.lock = threading.Lock()
        self.members: Set[int] = set()
        self._size = size
        self._made = 0
        self._busy = 0
        self._todo: queue.SimpleQueue[Callable[[], int]] = queue.SimpleQueue()
        self._told: Deque[Tuple[Optional[Told], int, Optional[BaseException]]] = collections.deque()
        self._is_woken = False

    @property
    def is_free(self) -> bool:
        """Whether a predict would begin at once, and may."""
        return self._busy < self._size and self.status == exits.OK

    @property
    def is_idle(self) -> bool:
        """Whether every predict has ended, and all was heard that came of it."""
        return not self._busy

    def begin(self, predict: Callable[[], int]) -> None:
        """Have a member that is free run a predict, which returns what `status` may become."""
        self._busy += 1
        if self._busy > self._made:
            self._made += 1
            # The end of the process waits for none of them.
            threading.Thread(target=self._work, daemon=True).start()
        self._todo.put(predict)

    def tell(self, *told: Told) -> None:
        """Say something of the predict that this member runs."""
        for each in told:
            self._say(each)

    def hear(self) -> List[Told]:
        """Return what was told since.

        Raises:
            BaseException: a predict has ended in it.
        """
        # In this order: whatever is said after it was read wakes again, or is heard now.
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, _ENOUGH)
        self._is_woken = False
        heard: List[Told] = []
        while self._told:
            told, status, error = self._told.popleft()
            if told is not None:
                heard.append(told)
                continue
            self._busy -= 1
            self.status = self.status or status
            if error is not None:
                raise error
        return heard

    def wait(self) -> None:
        """Wait until it is idle; what was told is of no use any more."""
        waiting = threading.Event()
        while not self.is_idle:
            self.hear()
            # Nothing is to be read meanwhile, and it does not matter how soon this ends.
            waiting.wait(0.001)

    def _work(self) -> None:
        self.members.add(threading.get_ident())
        while True:
            predict = self._todo.get()
            status, error = exits.OK, None
            try:
                with self.lock:
                    status = predict()
            except BaseException as raised:  # noqa: BLE001 - raised again where it is heard
                error = raised
            # It has tensors, and the next wait may be long.
            del predict
            self._say(None, status, error)

    def _say(self, told: Optional[Told], status: int = exits.OK, error: Optional[BaseException] = None) -> None:
        self._told.append((told, status, error))
        if not self._is_woken:
            self._is_woken = True
            os.write(self._wake, b"\0")


class Unlocked:
    """An engine, which the members of a crew have compute while others go on."""

    def __init__(self, engine: Engine, crew: Crew) -> None:
        self._engine = engine
        self._crew = crew

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def predict(self, inputs: Arrays) -> Arrays:
        """As that of the engine."""
        if threading.get_ident() not in self._crew.members:
            return self._engine.predict(inputs)
        self._crew.lock.release()
        try:
            return self._engine.predict(inputs)
        finally:
            self._crew.lock.acquire()
