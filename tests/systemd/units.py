"""Installation of the repository's units into a manager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from testkit import mindir

from .manager import Manager

# mutants.py sets this to a directory with changed units.
DIRECTORY = Path(os.environ.get("WEIGHTD_UNITS", mindir.REPOSITORY / "systemd"))
INSTALLED = "/etc/systemd/system"
SLICE = "weightd.slice"


def unit_files(directory: Path = DIRECTORY) -> Sequence[str]:
    """Return the names of the units, without drop-ins."""
    return sorted(each.name for each in directory.iterdir() if each.suffix in (".service", ".socket", ".slice"))


def install(manager: Manager, directory: Path = DIRECTORY) -> None:
    """Install the units, create users, groups and directories, and reload systemd."""
    for name in unit_files(directory):
        manager.write(f"{INSTALLED}/{name}", (directory / name).read_text("utf-8"))
    for kind, command in (("sysusers.d", "systemd-sysusers"), ("tmpfiles.d", "systemd-tmpfiles --create")):
        manager.write(f"/usr/lib/{kind}/weightd.conf", (directory / kind / "weightd.conf").read_text("utf-8"))
        manager.run([*command.split(), "weightd.conf"])
    manager.systemctl("daemon-reload")
