"""The tables [listeners.NAME]: addresses for clients that speak ZeroMQ, and how these clients authenticate."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd_common import endpoints, toml_schema
from weightd_common.curve_keys import KEY_CHARACTERS, KeyFileError, read_secret
from weightd_common.toml_schema import ErrorCollector, check_name, derived, user_path
from weightd_daemon.config.daemon import DaemonConfig, check_address, normalize_address, zmq_addresses
from weightd_daemon.config.tenants import DEFAULT_TENANT_NAME, TenantConfig
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, boolean, describe_value, integer, label, list_of, one_of, text

# Name of the listener that exists without tables [listeners.NAME]. If a service manager passes several sockets, further
# listeners get this name with a number.
_DEFAULT_NAME = "default"

NONE, CURVE = SECURITY_MODES = ("none", "curve")

_TCP = "tcp://"

_MAX_COUNT = 2**31

_INSECURE_TCP_TEXT = (
    "over TCP without CURVE, any client that reaches the port can send requests, and anyone on the network path can "
    "read and change messages"
)


@dataclass(frozen=True)
class ListenerConfig:
    """A table [listeners.NAME]."""

    address: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """Address on which the daemon listens: ipc:///ABSOLUTE/PATH or tcp://HOST:PORT."""

    security: str = field(default=NONE, metadata=one_of(SECURITY_MODES))
    """"curve": connections are encrypted, and a client must have one of the keys in a tenant's `keys`, or any key if
    there is a table [tenants.default]. "none": connections are not encrypted."""

    key: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """File with the listener's secret key from `weightctl keygen`, required with "curve". Only its owner may have
    access to it."""

    insecure: bool = field(default=False, metadata=boolean())
    """Whether to accept clients without authentication and encryption, required for tcp:// without "curve": any client
    that reaches the port may send requests, and anyone on the network path may read and change all messages."""

    tenants: tuple[str, ...] = field(default=(), metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENANTS))
    """Tenants that may use this listener. Empty: all tenants."""

    max_connections: int = field(default=0, metadata=integer(0, _MAX_COUNT))
    """Maximum connections to this listener. 0: limited only by file descriptors."""

    secret: str = field(default="", repr=False, metadata=derived(text(KEY_CHARACTERS, empty=True)))
    """The content of the file `key`."""


def read_listeners(
    content: Any,
    daemon: DaemonConfig,
    tenants: Mapping[str, TenantConfig],
    base: Path,
    listen_addresses: Sequence[str],
    problems: ErrorCollector,
) -> Mapping[str, ListenerConfig]:
    """Return the listeners by name; errors are added to `problems`.

    Args:
        content: the parsed TOML.
        daemon: the complete table [daemon]. Its `socket` is the only listener if there are no tables [listeners.NAME]
            and no sockets from a service manager.
        tenants: the tenants of the file.
        base: the directory of the file, to which paths are relative.
        listen_addresses: see `load`. If there are no tables [listeners.NAME], the listeners are the ipc:// and tcp://
            addresses in `listen_addresses`.
        problems: as in `complete_daemon`.

    Raises:
        FieldError: `content` is not a table with tables [listeners.NAME], or has too many tables.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [listeners.NAME]")
    listener_tables = cast("dict[str, Any]", content)
    if len(listener_tables) > limits.MAX_LISTENERS:
        raise FieldError(f"expected at most {limits.MAX_LISTENERS} listeners, got {len(listener_tables)}")
    listeners: dict[str, ListenerConfig] = {}
    error_count = len(problems.errors)
    for name, table in listener_tables.items():
        with problems.at(f".{label(name)}"):
            problems.add(check_name("listener", name))
            listener = toml_schema.read_table(ListenerConfig, table, problems, section=f"listeners.{name}")
            # The address is None if the table has no key `address`.
            problems.add((each.at(".address") for each in check_address(listener.address or "")), "address")
            problems.add(_check_security(listener, tenants), "address", "security", "key", "insecure", "tenants")
            problems.add(_check_tenants(listener, tenants), "tenants")
            listeners[name] = _with_secret_key(listener, base, problems)
    if listener_tables and len(problems.errors) == error_count:
        problems.add(_check_all_listeners(listeners, listen_addresses))
    return listeners or _default_listeners(daemon, listen_addresses, problems)


def allowed_keys(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> tuple[str, ...] | None:
    """Return the public keys, in Z85, of clients that may connect to a listener with "curve"; None: any key."""
    admitted_tenants = {
        name: tenant for name, tenant in tenants.items() if not listener.tenants or name in listener.tenants
    }
    if DEFAULT_TENANT_NAME in admitted_tenants:
        return None
    return tuple(key for tenant in admitted_tenants.values() for key in tenant.public_keys)


def _check_security(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> Iterator[FieldError]:
    is_tcp = (listener.address or "").startswith(_TCP)
    if listener.security == CURVE:
        if not listener.key:
            yield FieldError(
                'missing: security = "curve" needs a file with a secret key; create one with weightctl keygen'
            ).at(".key")
        if importlib.util.find_spec("nacl") is None:
            yield FieldError('"curve" needs PyNaCl, which is not installed: pip install "./weightd[daemon]"').at(
                ".security"
            )
        if listener.insecure:
            yield FieldError('expected false with security = "curve"').at(".insecure")
        if not is_tcp:
            yield FieldError('expected "none" for ipc://: the kernel identifies its clients').at(".security")
        if allowed_keys(listener, tenants) == ():
            text = "no client could connect: none of its tenants has `keys`, and there is no [tenants.default]"
            yield FieldError(text).at(".security")
    else:
        if listener.key:
            yield FieldError('has no effect without security = "curve"').at(".key")
        if is_tcp and not listener.insecure:
            yield FieldError(
                f'missing: expected security = "curve" with a key, or insecure = true: {_INSECURE_TCP_TEXT}'
            ).at(".insecure")
        if listener.insecure and not is_tcp:
            yield FieldError("expected false for ipc://: the kernel identifies its clients").at(".insecure")


def _check_tenants(listener: ListenerConfig, tenants: Mapping[str, TenantConfig]) -> Iterator[FieldError]:
    for index, each in enumerate(listener.tenants):
        if each not in tenants:
            yield (
                FieldError(f"expected the name of a table [tenants.NAME], got {describe_value(each)}")
                .at(f"[{index}]")
                .at(".tenants")
            )


def _with_secret_key(listener: ListenerConfig, base: Path, problems: ErrorCollector) -> ListenerConfig:
    if listener.security != CURVE or not listener.key:
        return listener
    path = (base / listener.key).absolute()
    try:
        secret = read_secret(path)
    except KeyFileError as error:
        problems.add([FieldError(str(error)).at(".key")], "key")
        return listener
    return dataclasses.replace(listener, key=str(path), secret=secret)


def _check_all_listeners(
    listeners: Mapping[str, ListenerConfig], listen_addresses: Sequence[str]
) -> Iterator[FieldError]:
    name_by_address: dict[str, str] = {}
    for name, listener in listeners.items():
        other = name_by_address.setdefault(normalize_address(listener.address), name)
        if other != name:
            text = f"listener {other} already has the address {listener.address!r}"
            yield FieldError(text).at(f".{label(name)}.address")
    configured_addresses = {listener.address for listener in listeners.values()}
    for address in zmq_addresses(listen_addresses):
        if address not in configured_addresses:
            # The service manager listens on this address, so clients can connect, but no listener would answer them.
            yield FieldError(
                f"expected a listener with address {address}, on which the service manager listens (weightd.socket)"
            )


def _default_listeners(
    daemon: DaemonConfig, listen_addresses: Sequence[str], problems: ErrorCollector
) -> Mapping[str, ListenerConfig]:
    passed_addresses = sorted(zmq_addresses(listen_addresses), key=lambda each: each != daemon.socket)
    if not listen_addresses:
        passed_addresses = [daemon.socket]
    for address in passed_addresses:
        if endpoints.is_tcp_address(address):
            table = (
                f'a table [listeners.NAME] with address = "{address}" that has security = "curve", or insecure = true'
            )
            problems.add([FieldError(f"expected {table}: {_INSECURE_TCP_TEXT}")])
    names = (f"{_DEFAULT_NAME}-{number}" if number > 1 else _DEFAULT_NAME for number in itertools.count(1))
    return {name: ListenerConfig(address) for name, address in zip(names, passed_addresses, strict=False)}
