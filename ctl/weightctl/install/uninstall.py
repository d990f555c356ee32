"""`install-units --remove`: takes away what install-units has written, and what makes systemd start it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Collection, Iterator, List, Sequence, Tuple

from weightctl.install.files import FileState, remove, unlink
from weightctl.install.plan import UNIT_DIRECTORY, PlannedFile

NEXT_STEPS = (
    (
        "systemctl stop 'weightd-gateway.*' weightd.socket weightd.service 'weightd@*'",
        "what runs goes on until then",
    ),
    ("systemctl daemon-reload", ""),
)

REMAINING_NOTE = (
    "what is yours remains: /etc/weightd, drop-ins, /var/cache/weightd, /var/lib/weightd, the users weightd and "
    "weightd-gateway, the group weightd-clients, and the environment that weightd is installed in."
)


def remove_planned(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    """Remove the planned files below `prefix`, and the links by which systemctl has enabled them.

    Yields:
        What became of each that was there.

    Raises:
        Refused: one cannot be removed.
    """
    units: List[str] = []
    for each in planned:
        path = prefix / each.path.relative_to("/")
        state = remove(path, dry_run=dry_run)
        if state is not FileState.ABSENT:
            yield state, path
        if state is FileState.REMOVED:
            units.append(path.name)
            if not dry_run:
                _prune(prefix, each.path.parent.relative_to("/"))
    for link in sorted(_enable_links(prefix / UNIT_DIRECTORY, units)):
        if not dry_run:
            unlink(link)
        yield FileState.REMOVED, link


def _enable_links(directory: Path, units: Collection[str]) -> Iterator[Path]:
    """Yield the links to units, instances among them, in the directories of those that want them."""
    for link in directory.glob("*.wants/*"):
        if link.is_symlink() and Path(os.readlink(str(link))).name in units:
            yield link


def _prune(prefix: Path, directory: Path) -> None:
    """Remove directories that only weightd had a use for, if they are empty."""
    with contextlib.suppress(OSError):
        while "weightd" in directory.parts:
            (prefix / directory).rmdir()
            directory = directory.parent
