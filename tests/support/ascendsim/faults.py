"""Where the faults that a test has ordered happen."""

from __future__ import annotations

import os

from ascendsim.driver import Driver
from ascendsim.stall import stall
from ascendsim.switches import Fault


class Failed(Exception):
    """The operation fails, for no reason that anybody learns."""


class Garbage(Exception):
    """The operation gives a wrong answer."""


def begin(driver: Driver, operation: str, who: str) -> None:
    """An operation begins: count it, take the time that all of them take, and suffer what was ordered."""
    driver.count(operation)
    switches = driver.switches
    stall(switches.build_seconds if operation == "build" else switches.predict_seconds)
    suffer(driver, operation, who, "start")


def suffer(driver: Driver, operation: str, who: str, at: str) -> None:
    """Do what was ordered for this place, if it is this operation's turn."""
    for fault in driver.switches.faults:
        if (fault.operation, fault.at) == (operation, at) and fault.who in ("all", who):
            turn = driver.count(f"fault {fault.number}") - fault.skip
            if turn >= 0 and (fault.times == 0 or turn < fault.times):
                _do(fault)


def _do(fault: Fault) -> None:
    if fault.action == "hang":
        stall()
    if fault.action == "slow":
        stall(fault.seconds)
    if fault.action == "crash":
        os.kill(os.getpid(), fault.signal)
        stall()  # the signal comes before this ends, or is one that does not kill
    if fault.action == "fail":
        raise Failed
    if fault.action == "garbage":
        raise Garbage
