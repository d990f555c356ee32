"""The table [daemon], the addresses at which clients connect, and the default locations of files.

Clients that speak ZeroMQ connect to `ipc://PATH` and `tcp://HOST:PORT`. Other clients use weightd's own transport and
connect to `unix://PATH`. The configuration never names a `unix://` address, because the daemon derives this address
from `daemon.socket`. The suffix of its path distinguishes this socket from the other sockets that a service manager
passes.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from weightd_common import endpoints
from weightd_common.toml_schema import MAX_SECONDS, ErrorCollector, user_path
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.memory import MIB
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, integer, list_of, number, text

# Minimum of `max_memory_bytes`. With less memory, the daemon would reject even a few requests of ordinary size.
_MIN_MEMORY_BYTES = 16 * MIB

# Minimum of `max_batch_seconds`. With shorter batches, the messages between batches would take most of the time.
_MIN_BATCH_S = 0.001


@dataclass(frozen=True)
class DaemonConfig:
    """The table [daemon]."""

    socket: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Address of the daemon: ipc:///ABSOLUTE/PATH or tcp://HOST:PORT. The daemon's files are named after it. ZeroMQ
    clients connect to it unless there are tables [listeners.NAME]. Other clients of this host connect to the Unix
    socket PATH.unix or, with tcp://, to one in `runtime_dir`. Default: ipc:// with weightd.sock in `runtime_dir`."""

    runtime_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of the sockets. Default: the directory from systemd, otherwise /run/weightd for root and
    XDG_RUNTIME_DIR/weightd for other users."""

    cache_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of model snapshots and page stores, on a disk. Default: the directory from systemd, otherwise
    /var/cache/weightd for root and ~/.cache/weightd for other users."""

    drain_timeout: float = field(default=30.0, metadata=number(MAX_SECONDS))
    """Seconds for which a stopping daemon continues to process accepted requests."""

    max_memory_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Maximum bytes of accepted requests and unread responses; at least 16777216 (16 MiB). Above it, the daemon rejects
    requests of, or disconnects, the user that holds most. 0: a quarter of the memory of the host or of the daemon's
    control group."""

    max_shm_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Maximum bytes of shared memory that one user may register for tensors. Written memory counts as the user's,
    except for outputs. 0: a quarter, as for `max_memory_bytes`."""

    max_user_connections: int = field(default=1024, metadata=integer(0, 2**31))
    """Maximum connections of one user to the Unix socket, and of one user or host to each listener. A closed connection
    to the Unix socket counts until the client has read everything. With tables [tenants.NAME], all users of this host
    without a tenant count as one. Root and the daemon's own user have no limit. 0: no limit."""

    max_user_connection_rate: float = field(default=256.0, metadata=number(1e6))
    """Maximum new connections per second of one user or host, counted as for `max_user_connections`, which also limits
    a burst after a pause. 0: no limit."""

    accounting_interval: float = field(default=0.0, metadata=number(MAX_SECONDS))
    """Interval in seconds, at least 1, at which the daemon logs the usage of each tenant that has sent requests. 0: no
    such log lines."""

    max_batch_seconds: float = field(default=0.1, metadata=number(MAX_SECONDS))
    """Approximate maximum seconds of one batch while requests of another tenant are queued, at least 0.001. A smaller
    value shortens the wait of other tenants; a larger one uses devices more efficiently. Longer requests that cannot be
    split do not get the last free worker of a model, unless the requests of other tenants take about as long."""

    max_model_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Budget in bytes for the memory of all models on the CPU. For models with `load = "on_demand"`, idle ones are
    unloaded to keep it. On a card, the memory of the card is the budget. 0: no limit."""

    cache_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Maximum bytes of model snapshots in `cache_dir`. Above it, unloaded models lose their snapshots, the least
    recently used first; the next load reads the files again. 0: no limit."""

    min_resident: float = field(default=5.0, metadata=number(MAX_SECONDS))
    """Seconds for which a model stays loaded at least, so that models do not displace each other all the time."""

    max_load_queue: int = field(default=64, metadata=integer(1, 100_000))
    """Maximum models that wait for memory; requests to further models fail with RESOURCE_EXHAUSTED."""

    pass_environment: tuple[str, ...] = field(default=(), metadata=list_of(text(limits.MAX_NAME_BYTES), 256))
    """Additional environment variables for workers: a name, or a prefix followed by *. By default workers get only the
    variables that engines read."""

    @property
    def user_limits(self) -> UserConnectionLimits:
        """The limits on the connections of one user."""
        return UserConnectionLimits(self.max_user_connections, self.max_user_connection_rate)

    @property
    def daemon_key(self) -> str:
        """A short name derived from `socket`; file names contain this name, so that daemons never share a file."""
        return endpoints.daemon_key(self.socket)

    @property
    def private_dir(self) -> Path:
        """The directory of this daemon's snapshots and page stores."""
        return Path(self.cache_dir, self.daemon_key)

    @property
    def counters_file(self) -> Path:
        """The file in which the daemon keeps counters, so that they survive a restart."""
        return Path(self.cache_dir, f"{self.daemon_key}.counters")

    @property
    def children_socket(self) -> Path:
        """The path of the socket to which the holders and workers of this daemon connect."""
        return Path(self.runtime_dir, f"{self.daemon_key}.sock")

    @property
    def children_address(self) -> str:
        """The address of `children_socket`."""
        return f"ipc://{self.children_socket}"

    @property
    def channel_socket(self) -> Path:
        """The path of the socket to which workers connect their channels, over which they get requests."""
        return Path(endpoints.channel_path(self.children_address))

    @property
    def unix_socket(self) -> Path:
        """The path of the Unix socket for clients on this host."""
        return Path(endpoints.unix_path(self.socket, self.runtime_dir))


def complete_daemon(
    config: DaemonConfig,
    base: Path,
    listen_addresses: Sequence[str],
    problems: ErrorCollector,
    unit: UnitDefaults | None = None,
) -> DaemonConfig:
    """Return `config` with its defaults filled in, its socket checked, and its paths made absolute.

    Args:
        config: the table as it was read.
        base: the directory to which paths are relative.
        listen_addresses: see `load`. If there are any, `socket` must be one of `daemon_socket_addresses`, and the first
            of these is the default.
        problems: errors are added to this collector, which already has the errors of single keys. If it contains
            errors, the result must not be used.
        unit: the systemd unit whose defaults apply; None: the defaults of this process apply.
    """
    runtime_dir = config.runtime_dir or (unit.runtime_dir if unit else default_runtime_dir())
    runtime_dir = str((base / runtime_dir).absolute())
    cache_dir = config.cache_dir or (unit.cache_dir if unit else default_cache_dir())
    cache_dir = str((base / cache_dir).absolute())
    allowed_sockets = daemon_socket_addresses(listen_addresses)
    default_socket = (
        allowed_sockets[0] if allowed_sockets else unit.socket if unit else endpoints.socket_address(runtime_dir)
    )
    socket = config.socket or default_socket
    complete = dataclasses.replace(config, socket=socket, runtime_dir=runtime_dir, cache_dir=cache_dir)
    path_errors = check_socket_path(str(complete.channel_socket))
    problems.add((each.at(".runtime_dir") for each in path_errors), "runtime_dir")
    problems.add(_check_socket(socket, allowed_sockets), "socket", "runtime_dir")
    problems.add(_check_max_memory(config.max_memory_bytes), "max_memory_bytes")
    problems.add(_check_accounting_interval(config.accounting_interval), "accounting_interval")
    problems.add(_check_max_batch_time(config.max_batch_seconds), "max_batch_seconds")
    return complete


def _check_socket(socket: str, allowed_sockets: Sequence[str]) -> Iterator[FieldError]:
    if not allowed_sockets:
        yield from (each.at(".socket") for each in check_address(socket, endpoints.UNIX_SUFFIX))
    elif socket not in allowed_sockets:
        text = (
            f"expected {' or '.join(allowed_sockets)}, on which the service manager listens (weightd.socket), got"
            f" {socket!r}"
        )
        yield FieldError(text).at(".socket")


def _check_max_memory(max_memory_bytes: int) -> Iterator[FieldError]:
    if 0 < max_memory_bytes < _MIN_MEMORY_BYTES:
        expected = f"expected 0 or at least {_MIN_MEMORY_BYTES}, got {max_memory_bytes}"
        yield FieldError(expected).at(".max_memory_bytes")


def _check_max_batch_time(max_batch_seconds: float) -> Iterator[FieldError]:
    if max_batch_seconds < _MIN_BATCH_S:
        yield FieldError(f"expected at least {_MIN_BATCH_S}, got {max_batch_seconds:g}").at(".max_batch_seconds")


def _check_accounting_interval(interval: float) -> Iterator[FieldError]:
    if 0 < interval < 1:
        yield FieldError(f"expected 0 or at least 1, got {interval:g}").at(".accounting_interval")


EXPECTED_FORM = f"ipc:///ABSOLUTE/PATH or {endpoints.TCP_ADDRESS_FORM}"
_IPC = "ipc://"
_UNIX = "unix://"
_IPC_PATTERN = re.compile(r"ipc:///.*[^/]")


def check_address(address: str, suffix: str = "") -> Iterator[FieldError]:
    """Yield the errors in an address for clients that speak ZeroMQ.

    Args:
        address: the address as configured.
        suffix: the longest suffix that the daemon appends to the path of an ipc:// address for another socket.
    """
    if not _IPC_PATTERN.fullmatch(address) and not endpoints.is_tcp_address(address):
        yield FieldError(f"expected {EXPECTED_FORM}, got {address!r}")
    elif address.startswith(_IPC) and address.endswith(endpoints.UNIX_SUFFIX):
        yield FieldError(f"expected a path without the suffix {endpoints.UNIX_SUFFIX} of Unix sockets, got {address!r}")
    elif address.startswith(_IPC):
        yield from check_socket_path(address.removeprefix(_IPC) + suffix)


def check_socket_path(path: str) -> Iterator[FieldError]:
    """Yield an error if the path is too long for a socket."""
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        yield FieldError(f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}")


def normalize_address(address: str) -> str:
    """Return the address with its path normalized, so that two spellings of one path compare equal."""
    return _IPC + os.path.normpath(address.removeprefix(_IPC)) if address.startswith(_IPC) else address


def zmq_addresses(listen_addresses: Sequence[str]) -> list[str]:
    """Return the addresses at which clients speak ZeroMQ."""
    return [each for each in listen_addresses if not each.startswith(_UNIX)]


def daemon_socket_addresses(listen_addresses: Sequence[str]) -> list[str]:
    """Return the values that `daemon.socket` may have if a service manager has opened sockets at these addresses."""
    from_unix_sockets = [
        _IPC + each.removeprefix(_UNIX).removesuffix(endpoints.UNIX_SUFFIX)
        for each in listen_addresses
        if each.startswith(_UNIX)
    ]
    return from_unix_sockets or zmq_addresses(listen_addresses)


_SYSTEM_CACHE_DIR = "/var/cache/weightd"


class UnitDefaults(NamedTuple):
    """A systemd unit that starts weightd with a configuration file, and the defaults that the unit sets.

    Attributes:
        name: the name of the unit.
        runtime_dir: the unit's RuntimeDirectory=.
        cache_dir: the unit's CacheDirectory=.
        socket: the ipc:// address on which the unit's socket unit listens.
    """

    name: str
    runtime_dir: str
    cache_dir: str
    socket: str


def unit_of(path: Path) -> UnitDefaults | None:
    """Return the unit that uses the configuration at `path`; None if `path` is not in the units' directory."""
    if path.resolve().parent != default_path().parent.resolve():
        return None
    name = path.stem
    runtime_dir = _systemd_dir("RUNTIME_DIRECTORY") or endpoints.SYSTEM_RUNTIME_DIR
    return UnitDefaults(
        "weightd.service" if name == "weightd" else f"weightd@{name}.service",
        runtime_dir,
        _systemd_dir("CACHE_DIRECTORY") or _SYSTEM_CACHE_DIR,
        f"ipc://{runtime_dir}/{name}.sock",
    )


def default_path() -> Path:
    """Return the path of the service's configuration file: in the directory that systemd passes, or in /etc/weightd."""
    return Path(_systemd_dir("CONFIGURATION_DIRECTORY") or "/etc/weightd", "weightd.toml")


def default_runtime_dir() -> str:
    """Return the default directory of sockets: the directory that systemd passes, or a directory of the user."""
    return _systemd_dir("RUNTIME_DIRECTORY") or endpoints.runtime_dir()


def default_cache_dir() -> str:
    """Return the default directory of snapshots and page stores."""
    systemd_dir = _systemd_dir("CACHE_DIRECTORY")
    if systemd_dir or os.getuid() == 0:
        return systemd_dir or _SYSTEM_CACHE_DIR
    return endpoints.xdg_dir("XDG_CACHE_HOME") or _home_cache_dir()


def _home_cache_dir() -> str:
    try:
        return str(Path.home() / ".cache" / "weightd")
    except RuntimeError:  # the user id has no entry in the user database
        return f"/var/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks who owns the directory


def _systemd_dir(variable: str) -> str:
    return os.environ.get(variable, "").split(":")[0]
