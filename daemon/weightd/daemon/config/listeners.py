"""The tables [listeners.NAME]: where clients connect that speak ZeroMQ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from weightd.daemon.config import addresses, tables
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.config.names import of_name
from weightd.daemon.config.tables import Problems
from weightd.daemon.host.paths import user_path
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, label

# The listener where no table names one, or the first of those that a service manager has opened.
_DEFAULT = "default"


@dataclass(frozen=True)
class ListenerConfig:
    """A table [listeners.NAME]."""

    address: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """Where its clients connect: ipc:///ABSOLUTE/PATH or tcp://HOST:PORT."""


def read_listeners(
    content: Any, daemon: DaemonConfig, listening: Sequence[str], problems: Problems
) -> Mapping[str, ListenerConfig]:
    """Return the listeners by name; what is wrong is added to `problems`.

    Args:
        content: the tables, as TOML has them.
        daemon: complete; its socket is the one listener where there are no tables and nothing is open.
        listening: see `load`; where there are no tables, these are the listeners.
        problems: as in `complete_daemon`.

    Raises:
        FieldError: these are no tables, or too many.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [listeners.NAME]")
    given = cast("dict[str, Any]", content)
    if len(given) > limits.MAX_LISTENERS:
        raise FieldError(f"expected at most {limits.MAX_LISTENERS} listeners, got {len(given)}")
    listeners: dict[str, ListenerConfig] = {}
    before = len(problems.errors)
    for name, table in given.items():
        with problems.at(f".{label(name)}"):
            problems.note(of_name("listener", name))
            listener = tables.read(ListenerConfig, table, problems, section=f"listeners.{name}")
            # It is None where it is missing.
            problems.note((each.at(".address") for each in addresses.of_address(listener.address or "")), "address")
            listeners[name] = listener
    if given and len(problems.errors) == before:
        problems.note(_of_all(listeners, listening))
    return listeners or _without_tables(daemon, listening)


def _of_all(listeners: Mapping[str, ListenerConfig], listening: Sequence[str]) -> Iterator[FieldError]:
    names: dict[str, str] = {}
    for name, listener in listeners.items():
        other = names.setdefault(addresses.same(listener.address), name)
        if other != name:
            text = f"listener {other} has the address {listener.address!r} already"
            yield FieldError(text).at(f".{label(name)}.address")
    for address in addresses.zeromq(listening):
        if ListenerConfig(address) not in listeners.values():
            # Who connects there would wait for ever.
            yield FieldError(f"expected one at {address}, where the service manager listens (weightd.socket)")


def _without_tables(daemon: DaemonConfig, listening: Sequence[str]) -> Mapping[str, ListenerConfig]:
    open_already = sorted(addresses.zeromq(listening), key=lambda each: each != daemon.socket)
    if not listening:
        open_already = [daemon.socket]
    names = (f"{_DEFAULT}-{number}" if number > 1 else _DEFAULT for number in itertools.count(1))
    return {name: ListenerConfig(address) for name, address in zip(names, open_already, strict=False)}
