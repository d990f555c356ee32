"""Where the faults that a test has ordered happen."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import Callable, Generator, List, TypeVar

from ascendsim.driver import Driver

Result = TypeVar("Result")

_MUTEX_BYTES = 128
FOREVER_S = 10 * 365 * 24 * 3600.0


class Failed(Exception):
    """The operation fails, for no reason that anybody learns."""


class Garbage(Exception):
    """The operation gives a wrong answer."""


class Skipped(Exception):
    """The operation is told as done, and was not."""


class OtherTable(Exception):
    """The rank table is that of another group."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def begin(driver: Driver, operation: str, who: str, rank: int = -1) -> None:
    """An operation begins: count it, and suffer what was ordered."""
    driver.count(operation)
    suffer(driver, operation, who, "start", rank)


def suffer(driver: Driver, operation: str, who: str, at: str, rank: int = -1) -> None:
    """Do what was ordered for this place, if it is this operation's turn."""
    for fault in driver.switches.faults:
        meant = fault.who in ("all", who) and fault.rank in (-1, rank)
        if (fault.operation, fault.at) == (operation, at) and meant:
            turn = driver.count(f"fault {fault.number}") - fault.skip
            if turn >= 0 and (fault.times == 0 or turn < fault.times):
                _do(fault.action, fault.seconds)


def _do(action: str, seconds: float) -> None:
    if action == "hang":
        stall(FOREVER_S)
    if action == "slow":
        stall(seconds)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
        stall(FOREVER_S)  # the signal comes before this ends
    raised = {"fail": Failed, "garbage": Garbage, "skip": Skipped, "table": OtherTable}.get(action)
    if raised is not None:
        raise raised


def stall(seconds: float) -> None:
    """Wait as native code does: for a mutex that nobody lets go of. Unlike a sleep, no signal interrupts that."""
    libc = ctypes.PyDLL(None) if _gil_holders else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    end = time.time() + seconds
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(end), int(end % 1 * 1e9))))


_gil_holders: List[int] = []


@contextlib.contextmanager
def holding_the_gil() -> Generator[None, None, None]:
    """What stalls in here lets no other thread run: a call that does not release the GIL."""
    _gil_holders.append(1)
    try:
        yield
    finally:
        _gil_holders.pop()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Let another thread work, and wait for it as native code does: without a limit, and deaf to signals."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    results: List[Result] = []
    errors: List[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            errors.append(error)
        finally:
            libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=run, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
    if errors:
        raise errors[0]
    return results[0]
