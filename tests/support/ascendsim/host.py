"""Simulated machine, the interface of the simulator for tests."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List

from ascendsim import addresses, driver_state, switches
from ascendsim.switches import Fault, Switches

_PATH = Path(__file__).resolve().parent / "path"
_SUPPORT = Path(__file__).resolve().parents[1]


class Host:
    """A machine with cards. Its hccn.conf stands for /etc/hccn.conf.

    Args:
        directory: directory of all state, created here; its file system holds the cards' memory.
        cards: number of cards.
    """

    def __init__(self, directory: Path, cards: int = 1) -> None:
        self.directory = directory
        self.cards = cards
        for each in ("processes", "memory"):
            (directory / each).mkdir(parents=True)
        (directory / "cards").write_text(str(cards), encoding="ascii")
        lines = [f"address_{card}={addresses.of_card(card)}\n" for card in range(cards)]
        (directory / "hccn.conf").write_text("".join(lines), encoding="ascii")
        self._store = driver_state.Store(directory)
        self._faults = 0
        self._switches = Switches()
        self.switch()

    def switch(self, **values: Any) -> None:
        """Change fields of `Switches`. Each process reads them at its next operation."""
        switches.check(**values)
        self._switches = dataclasses.replace(self._switches, **values)
        switches.write(self.directory, self._switches)

    def fault(
        self,
        operation: str,
        action: str,
        who: str = "all",
        *,
        skip: int = 0,
        times: int = 0,
        seconds: float = 0.0,
        at: str = "start",
        rank: int = -1,
    ) -> None:
        """Add a `Fault`. It counts matching operations of all processes from now on."""
        switches.check(operation=operation, action=action, who=who, at=at)
        self._faults += 1
        fault = Fault(self._faults, operation, action, who, skip, times, seconds, at, rank)
        self.switch(faults=(*self._switches.faults, fault))

    def clear_faults(self) -> None:
        """Remove all faults."""
        self.switch(faults=())

    def card_state(self, device: int = 0) -> driver_state.Card:
        """Return the current memory of a card, without memory of processes that have exited."""
        with self._store.open() as (entries, values):
            capacity = values.capacity_mib * driver_state.MIB
            return driver_state.Card(
                capacity, entries.used(device), tuple(entries.on(device)), tuple(entries.users(device))
            )

    def copies_of_weights(self, device: int = 0) -> int:
        """Return the number of copies of weights on a card, shared or private."""
        kinds = [each.kind for each in self.card_state(device).allocations]
        return kinds.count(driver_state.WEIGHTS) + kinds.count(driver_state.PRIVATE_WEIGHTS)

    def count(self, operation: str) -> int:
        """Return the number of operations ("build" or "predict") that all processes have started on cards."""
        switches.check(operation=operation)
        with self._store.open() as (entries, _):
            return entries.counters.get(operation, 0)

    def driver_log(self) -> List[str]:
        """Return the driver's log with the reasons of errors. On a real machine it is in the kernel's log."""
        file = self.directory / "driver.log"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def environment(host: Host, pid: int = 0) -> Dict[str, str]:
    """Return the environment variables that lead a process to the simulator and `host`; `pid` is its driver's pid."""
    before = os.environ.get("PYTHONPATH")
    path = [str(_PATH), str(_SUPPORT), *([before] if before else [])]
    variables = {"PYTHONPATH": os.pathsep.join(path), "ASCENDSIM": str(host.directory)}
    return {**variables, "ASCENDSIM_PID": str(pid)} if pid else variables
