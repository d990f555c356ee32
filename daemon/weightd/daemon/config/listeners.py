"""The tables [listeners.NAME]: where clients connect that speak ZeroMQ, and who they have to be."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd.daemon.config import addresses
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.config.names import of_name
from weightd.daemon.config.tenants import DEFAULT, TenantConfig
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, boolean, got, integer, label, many, one_of, text
from weightd.shared import tables, tcp
from weightd.shared.keys import KEY_CHARACTERS, KeyFileError, read_secret
from weightd.shared.tables import Problems, derived
from weightd.shared.userpaths import user_path

# The listener where no table names one, or the first of those that a service manager has opened.
_DEFAULT = "default"

NONE, CURVE = SECURITIES = ("none", "curve")

_TCP = "tcp://"

_MOST_COUNT = 2**31

_STRANGERS = (
    "over TCP without CURVE whoever reaches the port may ask, and whoever is on the way may read and change what is "
    "said"
)


@dataclass(frozen=True)
class ListenerConfig:
    """A table [listeners.NAME]."""

    address: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """Where its clients connect: ipc:///ABSOLUTE/PATH or tcp://HOST:PORT."""

    security: str = field(default=NONE, metadata=one_of(SECURITIES))
    """"curve": all is encrypted, and clients have to prove that they have a key of a tenant's `keys`."""

    key: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The file with its secret key, for "curve", which weightctl keygen makes; only its owner may read that."""

    insecure: bool = field(default=False, metadata=boolean())
    """Needed for tcp:// without "curve": whoever reaches the port may ask, and read and change what others say."""

    tenants: tuple[str, ...] = field(default=(), metadata=many(text(limits.MAX_NAME_BYTES), limits.MAX_TENANTS))
    """The tenants for which it is; others are refused there. None: all."""

    max_connections: int = field(default=0, metadata=integer(0, _MOST_COUNT))
    """Clients that may be connected there. 0: as many as there are descriptors for."""

    secret: str = field(default="", repr=False, metadata=derived(text(KEY_CHARACTERS, empty=True)))
    """What is in `key`."""


def read_listeners(
    content: Any,
    daemon: DaemonConfig,
    tenants: Mapping[str, TenantConfig],
    base: Path,
    listening: Sequence[str],
    problems: Problems,
) -> Mapping[str, ListenerConfig]:
    """Return the listeners by name; what is wrong is added to `problems`.

    Args:
        content: the tables, as TOML has them.
        daemon: complete; its socket is the one listener where there are no tables and nothing is open.
        tenants: as the file has them.
        base: the directory of the file: paths are relative to it.
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
            problems.note((each.at(".address") for each in addresses.check_address(listener.address or "")), "address")
            problems.note(_of_security(listener, tenants), "address", "security", "key", "insecure", "tenants")
            problems.note(_of_tenants(listener, tenants), "tenants")
            listeners[name] = _with_secret(listener, base, problems)
    if given and len(problems.errors) == before:
        problems.note(_of_all(listeners, listening))
    return listeners or _without_tables(daemon, listening, problems)


def keys_of(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> tuple[str, ...] | None:
    """Return the public keys in Z85 that may connect to a listener with "curve"; None for any."""
    admitted = {name: tenant for name, tenant in tenants.items() if not listener.tenants or name in listener.tenants}
    if DEFAULT in admitted:
        return None
    return tuple(key for tenant in admitted.values() for key in tenant.public_keys)


def _of_security(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> Iterator[FieldError]:
    is_tcp = (listener.address or "").startswith(_TCP)
    if listener.security == CURVE:
        if not listener.key:
            yield FieldError('missing: security = "curve" needs the file of a secret key; see weightctl keygen').at(
                ".key"
            )
        if importlib.util.find_spec("nacl") is None:
            yield FieldError('"curve" needs PyNaCl, which is not installed: pip install "weightd[daemon]"').at(
                ".security"
            )
        if listener.insecure:
            yield FieldError('expected false with security = "curve"').at(".insecure")
        if not is_tcp:
            yield FieldError('expected "none" for ipc://: the kernel tells who connects there').at(".security")
        if keys_of(listener, tenants) == ():
            nobody = "nobody could connect: no tenant that it is for has `keys`, and there is no [tenants.default]"
            yield FieldError(nobody).at(".security")
    else:
        if listener.key:
            yield FieldError('expected none without security = "curve"').at(".key")
        if is_tcp and not listener.insecure:
            yield FieldError(f'missing: expected security = "curve" with a key, or insecure = true: {_STRANGERS}').at(
                ".insecure"
            )
        if listener.insecure and not is_tcp:
            yield FieldError("expected false for ipc://: the kernel tells who connects there").at(".insecure")


def _of_tenants(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> Iterator[FieldError]:
    for index, each in enumerate(listener.tenants):
        if each not in tenants:
            yield FieldError(f"expected a tenant that has a table, got {got(each)}").at(f"[{index}]").at(".tenants")


def _with_secret(listener: ListenerConfig, base: Path, problems: Problems) -> ListenerConfig:
    if listener.security != CURVE or not listener.key:
        return listener
    path = (base / listener.key).absolute()
    try:
        secret = read_secret(path)
    except KeyFileError as error:
        problems.note([FieldError(str(error)).at(".key")], "key")
        return listener
    return dataclasses.replace(listener, key=str(path), secret=secret)


def _of_all(listeners: Mapping[str, ListenerConfig], listening: Sequence[str]) -> Iterator[FieldError]:
    names: dict[str, str] = {}
    for name, listener in listeners.items():
        other = names.setdefault(addresses.normalize(listener.address), name)
        if other != name:
            text = f"listener {other} has the address {listener.address!r} already"
            yield FieldError(text).at(f".{label(name)}.address")
    known = {listener.address for listener in listeners.values()}
    for address in addresses.zmq_addresses(listening):
        if address not in known:
            # Who connects there would wait for ever.
            yield FieldError(f"expected one at {address}, where the service manager listens (weightd.socket)")


def _without_tables(daemon: DaemonConfig, listening: Sequence[str], problems: Problems) -> Mapping[str, ListenerConfig]:
    open_already = sorted(addresses.zmq_addresses(listening), key=lambda each: each != daemon.socket)
    if not listening:
        open_already = [daemon.socket]
    for address in open_already:
        if tcp.is_address(address):
            table = (
                f'a table [listeners.NAME] with address = "{address}" that has security = "curve", or insecure = true'
            )
            problems.note([FieldError(f"expected {table}: {_STRANGERS}")])
    names = (f"{_DEFAULT}-{number}" if number > 1 else _DEFAULT for number in itertools.count(1))
    return {name: ListenerConfig(address) for name, address in zip(names, open_already, strict=False)}
