"""The table [daemon]."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightd.daemon.config.defaults import default_cache_dir, default_runtime_dir
from weightd.daemon.config.tables import MAX_SECONDS, Problems
from weightd.daemon.host.memory import MIB
from weightd.daemon.host.paths import user_path
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, integer, number
from weightd.shared import paths, tcp

_SOCKET_PATH = re.compile(r"ipc:///.*[^/]")

# With less, a few requests of ordinary size would be too many.
_LEAST_MEMORY_BYTES = 16 * MIB


@dataclass(frozen=True)
class DaemonConfig:
    """The table [daemon]."""

    socket: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Where clients connect: ipc://PATH or tcp://HOST:PORT. Default: weightd.sock in `runtime_dir`."""

    runtime_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of the sockets. Default: what systemd gives, /run/weightd for root, XDG_RUNTIME_DIR/weightd."""

    cache_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of model snapshots and page stores, on a disk. Default: /var/cache/weightd or ~/.cache/weightd."""

    drain_timeout: float = field(default=30.0, metadata=number(MAX_SECONDS))
    """Seconds that accepted requests may take when the daemon is asked to stop."""

    max_memory_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Bytes that the daemon keeps for its clients: requests under way and answers that they have not read. Past it who
    has most is refused or hung up first. At least 16 MiB. Default: a quarter of the memory of host or control group."""

    @property
    def key(self) -> str:
        """A short name for this daemon, made from its socket: two daemons never share a file."""
        return paths.key(self.socket)

    @property
    def private_dir(self) -> Path:
        """The directory of this daemon's snapshots and page stores."""
        return Path(self.cache_dir, self.key)

    @property
    def children_socket(self) -> Path:
        """The socket of this daemon's children."""
        return Path(self.runtime_dir, f"{self.key}.sock")


def complete_daemon(config: DaemonConfig, base: Path, listening: Sequence[str], problems: Problems) -> DaemonConfig:
    """Return `config` with its defaults filled in, its socket checked, and its paths made absolute.

    `listening`: see `load`; the first of them is the socket by default. What is wrong is added to `problems`, where
    that of single keys is already; what is returned is of use if there is none.
    """
    runtime_dir = str((base / (config.runtime_dir or default_runtime_dir())).absolute())
    cache_dir = str((base / (config.cache_dir or default_cache_dir())).absolute())
    socket = config.socket or (listening[0] if listening else paths.socket_address(runtime_dir))
    complete = dataclasses.replace(config, socket=socket, runtime_dir=runtime_dir, cache_dir=cache_dir)
    problems.note(_too_long(str(complete.children_socket), ".runtime_dir"), "runtime_dir")
    problems.note(_of_socket(socket, listening), "socket", "runtime_dir")
    problems.note(_too_little(config.max_memory_bytes), "max_memory_bytes")
    return complete


def _of_socket(socket: str, listening: Sequence[str]) -> Iterator[FieldError]:
    if listening and socket not in listening:
        expected = f"expected {' or '.join(listening)}, where the service manager listens (weightd.socket)"
        yield FieldError(f"{expected}, got {socket!r}").at(".socket")
    elif not _SOCKET_PATH.fullmatch(socket) and not tcp.is_address(socket):
        yield FieldError(f"expected ipc:///ABSOLUTE/PATH or {tcp.FORM}, got {socket!r}").at(".socket")
    elif socket.startswith("ipc://"):
        yield from _too_long(socket.removeprefix("ipc://"), ".socket")


def _too_little(max_memory_bytes: int) -> Iterator[FieldError]:
    if 0 < max_memory_bytes < _LEAST_MEMORY_BYTES:
        expected = f"expected 0 or at least {_LEAST_MEMORY_BYTES}, got {max_memory_bytes}"
        yield FieldError(expected).at(".max_memory_bytes")


def _too_long(path: str, key: str) -> Iterator[FieldError]:
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        yield FieldError(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}"
        ).at(key)
