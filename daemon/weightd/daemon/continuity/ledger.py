"""The accounts of tenants in a file, from which the next daemon goes on, whoever it is that has its processes.

A line of JSON for each account, the last one says how many there are. It is written anew now and then, and at the end:
what was counted after that is lost with a daemon that is killed. What is no such file is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weightd.daemon.host.timers import Timer
from weightd.daemon.tenants.accounts import Accounts, Figures
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, decode, plain

_log = logging.getLogger("weightd.accounts")

INTERVAL_S = 10.0

# At once, before the loop has its turn: a millisecond or two.
_MOST_AT_ONCE = 128

# One more than there are tenants operates, and one more than there are models is what is no model's.
_MOST_ACCOUNTS = (limits.MAX_TENANTS + 1) * (limits.MAX_MODELS + 1)
_MOST_BYTES = 2048 * _MOST_ACCOUNTS


class LedgerError(Exception):
    """What is in the file is not what one writes there."""


class Ledger:
    """The file at `path`.

    Args:
        path: in a directory that is the daemon's own.
        accounts: that are written, and go on from what is there.
        soon: has something called when all others have had their turn.

    Attributes:
        timer: call it when it is due.
    """

    def __init__(self, path: Path, accounts: Accounts, soon: Callable[[Callable[[], object]], object]) -> None:
        self.path = path
        self.timer = Timer(self._on_timer)
        self._accounts = accounts
        self._soon = soon
        self._is_open = False
        self._complained = False
        self._written = ""
        self._lines: list[str] = []
        self._left: Iterator[Figures] = iter(())

    def open(self, now: float) -> None:
        """There are tenants: go on with their accounts, if that was not done, and write them from now on."""
        if self._is_open:
            return
        self._is_open = True
        self.timer.set(now + INTERVAL_S)
        try:
            self._accounts.restore(read(self.path))
        except FileNotFoundError:
            pass
        except (OSError, LedgerError) as error:
            _log.warning("the accounts of tenants begin anew: %s: %s", self.path, getattr(error, "strerror", error))

    def close(self) -> None:
        """Write them for the last time."""
        if self._is_open:
            self._begin()
            while not self._go_on():
                pass

    def _on_timer(self, now: float) -> None:
        self.timer.set(now + INTERVAL_S)
        self._begin()
        self._soon(self._step)

    def _begin(self) -> None:
        self._lines = []
        self._left = self._accounts.figures()

    def _step(self) -> None:
        if not self._go_on():
            self._soon(self._step)

    def _go_on(self) -> bool:
        """Return whether all is written."""
        for number, each in enumerate(self._left, 1):
            self._lines.append(json.dumps(plain(each)))
            if number == _MOST_AT_ONCE:
                return False
        lines, self._lines = self._lines, []
        content = "".join(f"{line}\n" for line in [*lines, json.dumps({"accounts": len(lines)})])
        # A disk that sleeps may sleep on.
        if content != self._written:
            self._write(content)
        return True

    def _write(self, content: str) -> None:
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            # What an earlier daemon has left there may be anything.
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(content)
            new.replace(self.path)
        except OSError as error:
            if not self._complained:
                _log.warning("the accounts of tenants are not written: %s: %s", self.path, error.strerror)
            self._complained = True
        else:
            self._complained = False
            self._written = content


def read(path: Path) -> list[Figures]:
    """Return what was written at `path`.

    Raises:
        OSError: it cannot be read.
        LedgerError: it is something else, or not whole.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise LedgerError(f"expected a file of at most {_MOST_BYTES} bytes")
        lines = file.read(_MOST_BYTES).splitlines()
    *accounts, last = [*map(_value, lines)] or [None]
    if last != {"accounts": len(accounts)}:
        raise LedgerError(f"expected a last line that tells of {len(accounts)} accounts")
    try:
        return [decode(Figures, each) for each in accounts]
    except FieldError as error:
        raise LedgerError(str(error)) from None


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"not JSON: {error}") from None
