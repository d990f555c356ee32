"""Simulated kernel objects: a SOCK_SEQPACKET pair with its queues, and pages whose stores can be interrupted."""

from __future__ import annotations

import collections
import enum
import struct
from collections.abc import Callable
from typing import Any

from weightd_common.channels.pages import Page, page_over

CAPACITY = 6


# A message without bytes, which a receiver cannot tell from the end of the queue.
EMPTY = object()


class Result(enum.Enum):
    """The result of a call on a socket that returned no message."""

    NOTHING = "EAGAIN: nothing to read"
    FULL = "EAGAIN: the queue is full"
    BROKEN = "EPIPE"
    RESET = "ECONNRESET"
    END = "end of file"


class Died(Exception):
    """A simulated process is killed before its next store or system call."""


class Pair:
    """A SOCK_SEQPACKET pair, as section 4 of the facts describes it: one end at a client, duplicates of the other end.

    Processes that hold a duplicate of the workers' end read from one queue. A descriptor in a message that its receiver
    has not read counts as held by the receiver.
    """

    def __init__(self, serial: int, capacity: int = CAPACITY) -> None:
        self.serial = serial
        self.capacity = capacity
        self.holders: set[str] = set()
        self.to_workers: collections.deque[Any] = collections.deque()
        self.to_client: collections.deque[Any] = collections.deque()
        self.is_shut = False
        self.has_client = True
        self.is_reset = False
        self.is_reset_by_client = False

    @property
    def is_readable(self) -> bool:
        return bool(self.to_workers) or self.is_shut or not self.has_client

    def client_send(self, message: Any) -> Result | None:
        if self.is_reset:
            self.is_reset = False
            return Result.BROKEN
        if self.is_shut or not self.holders:
            return Result.BROKEN
        if len(self.to_workers) >= self.capacity:
            return Result.FULL
        self.to_workers.append(message)
        return None

    def client_receive(self) -> Any:
        if self.is_reset:
            self.is_reset = False
            return Result.RESET
        if self.to_client:
            return self.to_client.popleft()
        return Result.NOTHING if self.holders else Result.END

    def worker_receive(self) -> Any:
        if self.is_reset_by_client:
            self.is_reset_by_client = False
            return Result.RESET
        if self.to_workers:
            message = self.to_workers.popleft()
            return Result.END if message is EMPTY else message
        return Result.END if self.is_shut or not self.has_client else Result.NOTHING

    def worker_send(self, message: Any) -> Result | None:
        if self.is_reset_by_client:
            self.is_reset_by_client = False
            return Result.BROKEN
        if not self.has_client:
            return Result.BROKEN
        if len(self.to_client) >= self.capacity:
            return Result.FULL
        self.to_client.append(message)
        return None

    def close(self, holder: str) -> None:
        self.holders.discard(holder)
        if not self.holders and self.to_workers:
            self.to_workers.clear()
            self.is_reset = True

    def close_client(self) -> None:
        self.has_client = False
        if self.to_client:
            self.to_client.clear()
            self.is_reset_by_client = True


class Memory:
    """The memory of a page. Readers check that each value that they see has been stored as a whole."""

    def __init__(self, nbytes: int) -> None:
        self._memory = page_over(memoryview(bytearray(nbytes)))
        # Each word before and after the latest store. While a store is under way, either may be seen.
        stored: dict[int, tuple[int, int]] = {}
        words: Any = View(self._memory.words, self._memory.words, "<Q", stored)
        reals: Any = View(self._memory.reals, self._memory.words, "<d", stored)
        self.page = Page(words, reals)

    def watched(self, before_store: Callable[[], None]) -> Page:
        """Return the views of the page's writer."""
        words: Any = WriterView(self.page.words, before_store)
        reals: Any = WriterView(self.page.reals, before_store)
        return Page(words, reals)


class View:
    """A reader's view of a page."""

    def __init__(self, memory: Any, words: Any, form: str, stored: dict[int, tuple[int, int]]) -> None:
        self._memory = memory
        self._words = words
        self._form = form
        self._stored = stored

    def __getitem__(self, index: int) -> Any:
        assert self._words[index] in self._stored.get(index, (0,)), f"word {index} has a value that was never stored"
        return self._memory[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.store(index, value, lambda: None)

    def store(self, index: int, value: Any, between: Callable[[], None]) -> None:
        """Store a value. `between` is called before the store."""
        [word] = struct.unpack("<Q", struct.pack(self._form, value))
        self._stored[index] = self._words[index], word
        between()
        self._words[index] = word


class WriterView:
    """A writer's view: calls `before_store` before each store, which may raise `Died` or let other processes run."""

    def __init__(self, view: Any, before_store: Callable[[], None]) -> None:
        self._view = view
        self._before_store = before_store

    def __getitem__(self, index: int) -> Any:
        return self._view[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._view.store(index, value, self._before_store)


def watched(page: Page, before_store: Callable[[], None]) -> Page:
    """Return the views of a page's writer, which read and write its memory without further checks."""
    views: list[Any] = [PlainView(view, before_store) for view in page]
    return Page(*views)


class PlainView:
    """A writer's view that calls `before_store` before each store."""

    def __init__(self, memory: Any, before_store: Callable[[], None]) -> None:
        self._memory = memory
        self._before_store = before_store

    def __getitem__(self, index: int) -> Any:
        return self._memory[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._before_store()
        self._memory[index] = value


def new_page(nbytes: int) -> Page:
    return page_over(memoryview(bytearray(nbytes)))
