"""Where the faults that a test has ordered happen."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from ascendsim.driver import Driver

_MUTEX_BYTES = 128
_FOREVER_S = 10 * 365 * 24 * 3600.0


class Failed(Exception):
    """The operation fails, for no reason that anybody learns."""


class Garbage(Exception):
    """The operation gives a wrong answer."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def begin(driver: Driver, operation: str, who: str) -> None:
    """An operation begins: count it, and suffer what was ordered."""
    driver.count(operation)
    suffer(driver, operation, who, "start")


def suffer(driver: Driver, operation: str, who: str, at: str) -> None:
    """Do what was ordered for this place, if it is this operation's turn."""
    for fault in driver.switches.faults:
        if (fault.operation, fault.at) == (operation, at) and fault.who in ("all", who):
            turn = driver.count(f"fault {fault.number}") - fault.skip
            if turn >= 0 and (fault.times == 0 or turn < fault.times):
                _do(fault.action, fault.seconds)


def _do(action: str, seconds: float) -> None:
    if action == "hang":
        stall(_FOREVER_S)
    if action == "slow":
        stall(seconds)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
        stall(_FOREVER_S)  # the signal comes before this ends
    if action == "fail":
        raise Failed
    if action == "garbage":
        raise Garbage


def stall(seconds: float) -> None:
    """Wait as native code does: for a mutex that nobody lets go of. Unlike a sleep, no signal interrupts that."""
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    end = time.time() + seconds
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(end), int(end % 1 * 1e9))))
