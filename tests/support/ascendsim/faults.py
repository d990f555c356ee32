"""Execution of the faults that a test has set."""

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
    """Error: the operation fails without a reason."""


class Garbage(Exception):
    """Signal: the operation returns a wrong answer."""


class Skipped(Exception):
    """Signal: the operation reports success without running."""


class OtherTable(Exception):
    """Signal: the process reads the rank table of another group."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def begin(driver: Driver, operation: str, who: str, rank: int = -1) -> None:
    """Count the start of an operation, and execute its faults."""
    driver.count(operation)
    suffer(driver, operation, who, "start", rank)


def suffer(driver: Driver, operation: str, who: str, at: str, rank: int = -1) -> None:
    """Execute the fault at this point of the operation, if one is due."""
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
        stall(FOREVER_S)  # the signal arrives earlier
    raised = {"fail": Failed, "garbage": Garbage, "skip": Skipped, "table": OtherTable}.get(action)
    if raised is not None:
        raise raised


def stall(seconds: float) -> None:
    """Block like native code on a mutex that is never released. Unlike a sleep, signals do not interrupt this."""
    libc = ctypes.PyDLL(None) if _gil_holders else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    end = time.time() + seconds
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(end), int(end % 1 * 1e9))))


_gil_holders: List[int] = []


@contextlib.contextmanager
def holding_the_gil() -> Generator[None, None, None]:
    """Stop all other threads of the process during the block, like a call that does not release the GIL."""
    _gil_holders.append(1)
    try:
        yield
    finally:
        _gil_holders.pop()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Run `work` in another thread, and wait for it like native code: without a limit, ignoring signals."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    results: List[Result] = []
    errors: List[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            errors.append(error)
        finally:
            libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=run, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
    if errors:
        raise errors[0]
    return results[0]
