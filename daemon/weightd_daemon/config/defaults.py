"""Where things are that the configuration does not place, and the configuration itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from weightd_common import endpoints

_SYSTEM_CACHE_DIR = "/var/cache/weightd"


class UnitDefaults(NamedTuple):
    """A systemd unit that serves a configuration file, and the defaults that it has there.

    Attributes:
        name: of the unit.
        runtime_dir: its RuntimeDirectory=.
        cache_dir: its CacheDirectory=.
        socket: the ipc:// address at which its socket unit listens.
    """

    name: str
    runtime_dir: str
    cache_dir: str
    socket: str


def unit_of(path: Path) -> UnitDefaults | None:
    """Return the unit that serves the configuration at `path`; None where `path` is not in the units' directory."""
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
    """Return the configuration of the service: in the directory that systemd gives, else where that would be."""
    return Path(_systemd_dir("CONFIGURATION_DIRECTORY") or "/etc/weightd", "weightd.toml")


def default_runtime_dir() -> str:
    """Return the directory for sockets where the configuration names none: what systemd gives, else the user's."""
    return _systemd_dir("RUNTIME_DIRECTORY") or endpoints.runtime_dir()


def default_cache_dir() -> str:
    """Return the directory for snapshots and page stores where the configuration names none."""
    systemd_dir = _systemd_dir("CACHE_DIRECTORY")
    if systemd_dir or os.getuid() == 0:
        return systemd_dir or _SYSTEM_CACHE_DIR
    return endpoints.xdg_dir("XDG_CACHE_HOME") or _home_cache_dir()


def _home_cache_dir() -> str:
    try:
        return str(Path.home() / ".cache" / "weightd")
    except RuntimeError:  # a uid without an entry in the user database
        return f"/var/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks whose it is


def _systemd_dir(variable: str) -> str:
    return os.environ.get(variable, "").split(":")[0]
