"""The accounts of tenants while the daemon runs: who has one, shares of late, and what the log tells of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from weightd.daemon.host.timers import Timer
from weightd.daemon.tenants.accounts import ELSEWHERE, Account, Accounts
from weightd.daemon.tenants.directory import Directory
from weightd.protocol.schema import label

# Shares are those of six of them.
_TICK_S = 10.0

# Of a line: those on which most seconds were spent.
_MOST_MODELS = 8


_log = logging.getLogger("weightd.accounts")


class Accounting:
    """Looks after the accounts, where there are tenants.

    Args:
        tenants: as they are now.
        accounts: of all of them.
        models: called when it is needed; returns the names of those that there are.

    Attributes:
        timers: call it when something is due.
    """

    def __init__(self, tenants: Directory, accounts: Accounts, models: Callable[[], Collection[str]]) -> None:
        self._tenants = tenants
        self._accounts = accounts
        self._models = models
        self._intervals = Intervals(accounts)
        self._interval = 0.0
        self._tick = Timer(self._on_tick)
        self._line = Timer(self._on_line)
        self.timers = (self._tick, self._line)

    def renew(self, interval: float, now: float) -> None:
        """Another configuration is in force; `interval`: the seconds between lines of the log, 0 for none."""
        if not self._tenants.tells_apart:
            # What a reload has taken away is forgotten all the same.
            self._accounts.keep(self._names(), self._models())
            self._interval = 0.0
            return
        self._on_tick(now)
        if interval != self._interval:
            self._interval = interval
            self._intervals.begin(self._names())
            self._line.set(now + interval)

    def _names(self) -> list[str]:
        return [tenant.name for tenant in self._tenants.known]

    def _on_tick(self, now: float) -> None:
        if self._tenants.tells_apart:
            self._accounts.keep(self._names(), self._models())
            self._accounts.tick()
            self._tick.set(now + _TICK_S)

    def _on_line(self, now: float) -> None:
        if self._interval:
            for line in self._intervals.lines(self._names(), self._interval):
                _log.info("%s", line)
            self._line.set(now + self._interval)


class Counted(NamedTuple):
    """What a tenant has: the sum, which stays when a model goes, and the seconds of each model."""

    total: Account
    models: Mapping[str, float]


class Intervals:
    """Tells of each tenant what has been counted since it was told last.

    Args:
        accounts: of all tenants.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._told: dict[str, Counted] = {}

    def begin(self, tenants: Iterable[str]) -> None:
        """What these have now is not told."""
        self._told = {name: self._now(name) for name in tenants}

    def lines(self, tenants: Iterable[str], seconds: float) -> Iterator[str]:
        """Yield a line for each tenant that has asked anything, or been given seconds; since so many of them."""
        before, self._told = self._told, {name: self._now(name) for name in tenants}
        spent = {name: _since(before.get(name, _NOTHING), now) for name, now in self._told.items()}
        whole = sum(each.total.seat_seconds for each in spent.values())
        for name, each in spent.items():
            if not each.total.is_blank:
                yield f"tenant {label(name)}: {_text(each.total, seconds, whole)}{_of_models(each.models)}"

    def _now(self, name: str) -> Counted:
        models = {model: each.seat_seconds for model, each in self._accounts.items(name)}
        return Counted(self._accounts.total(name), models)


_NOTHING = Counted(Account(), {})


def _since(before: Counted, now: Counted) -> Counted:
    """What has been counted since; all of it, where it has begun anew."""
    if now.total.requests < before.total.requests:
        return now
    models = {model: seconds - before.models.get(model, 0.0) for model, seconds in now.models.items()}
    return Counted(_less(now.total, before.total), models)


def _less(now: Account, before: Account) -> Account:
    since = Account()
    for field in ("requests", "served", "rows", "seat_seconds", "waited_seconds", "bytes_in", "bytes_out", "deaths"):
        setattr(since, field, max(0, getattr(now, field) - getattr(before, field)))
    refused = {reason: count - before.refused.get(reason, 0) for reason, count in now.refused.items()}
    since.refused = {reason: count for reason, count in refused.items() if count > 0}
    return since


def _text(account: Account, seconds: float, total: float) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(account.refused.items()))
    refused = f"{account.failed} refused ({reasons})" if reasons else "none refused"
    share = f" ({account.seat_seconds / total:.0%} of all)" if total else ""
    parts = [
        f"{account.requests} requests in {seconds:.0f} s",
        f"{account.served} served",
        refused,
        f"{account.rows} rows",
        f"{account.seat_seconds:.3f} s of workers{share}",
        f"{account.waited_seconds:.3f} s waited",
        f"{account.bytes_in} bytes in",
        f"{account.bytes_out} bytes out",
    ]
    if account.deaths:
        parts.append(f"{account.deaths} workers lost")
    return ", ".join(parts)


def _of_models(models: Mapping[str, float]) -> str:
    used = [(seconds, model) for model, seconds in models.items() if model != ELSEWHERE and seconds > 0]
    most = sorted(used, reverse=True)[:_MOST_MODELS]
    return f"; {', '.join(f'{model} {seconds:.3f} s' for seconds, model in most)}" if most else ""
