"""What cards say of their memory, asked once before the first model is loaded there."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from weightd.daemon.children import helpers
from weightd.daemon.children.helpers import Answer
from weightd.daemon.children.running import Running
from weightd.daemon.host.ends import End
from weightd.daemon.host.memory import MIB
from weightd.shared.devices import is_cpu

_log = logging.getLogger("weightd")


class Card(Protocol):
    """A device.

    Attributes:
        name: of the device.
        capacity: bytes that may be used there; None where that is not known.
        said: bytes that the card itself has said are there; None if it has not.
    """

    name: str
    capacity: int | None
    said: int | None


class Probing:
    """Asks cards, each in the interpreter of a model that uses it.

    Args:
        running: has the processes.
        devices: by name.
    """

    def __init__(self, running: Running, devices: Mapping[str, Card]) -> None:
        self._running = running
        self._devices = devices
        # If in vain.
        self._asked: set[str] = set()

    def ask(self, python: str, names: Iterable[str], log: Path, then: Callable[[], None]) -> None:
        """Ask each of the cards of which nothing is known, one after another; then call `then`.

        Args:
            python: the interpreter that has the library of the cards.
            names: of devices.
            log: where the processes write.
            then: is called at once where there is nobody to ask.
        """
        names = list(names)
        card = next((self._devices[each] for each in names if self._is_unknown(each)), None)
        if card is None:
            then()
            return
        self._asked.add(card.name)
        go_on = functools.partial(self.ask, python, names, log, then)
        argv = [python, "-m", "weightd.worker.probe", "--device", card.name, "--parent", str(os.getpid())]
        try:
            # Its place is beside the snapshot for which it is asked.
            name = f"{log.parent.name}.{card.name}"
            helpers.ask(self._running, name, argv, log, functools.partial(self._on_answer, card, go_on))
        except OSError as error:
            _log.warning("%s: cannot be asked for its memory: %s", card.name, error.strerror)
            go_on()

    def _is_unknown(self, name: str) -> bool:
        return not is_cpu(name) and self._devices[name].capacity is None and name not in self._asked

    def _on_answer(self, card: Card, go_on: Callable[[], None], answer: Answer, end: End) -> None:
        free = answer.get("free_bytes")
        if isinstance(free, int):
            card.capacity = card.said = free
            _log.info("%s: %d MiB are free", card.name, free // MIB)
        else:
            why = answer.get("error") or end.words or end.how
            _log.warning("%s: cannot be asked for its memory: %s", card.name, why)
        go_on()
