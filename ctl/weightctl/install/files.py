"""Writes and removes files: whole or not at all, and only where nothing else stands."""

from __future__ import annotations

import contextlib
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Collection, Iterator, List, Sequence, Tuple

from weightctl import exit_codes
from weightctl.command import CommandError
from weightctl.install.plan import UNIT_DIRECTORY, PlannedFile, is_ours
from weightd_protocol.errors import Internal, PermissionDenied


class InstallError(CommandError):
    """A file cannot be written; the text names it."""

    status = exit_codes.CANNOT_WRITE
    code = Internal.code


class WriteNotAllowed(InstallError):
    """This user may not write there; the text names the path."""

    status = exit_codes.NO_PERMISSION
    code = PermissionDenied.code


class FileState(Enum):
    """What became of a file, or what would become of it."""

    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    REMOVED = "removed"
    ABSENT = "absent"
    # It is somebody else's: another file than an earlier install-units wrote, or a link, as of a mask.
    FOREIGN = "kept"


def compare(path: Path, content: bytes) -> FileState:
    """Return what `install` would do.

    Raises:
        InstallError: it cannot be known.
    """
    try:
        if path.is_symlink() or path.is_dir():
            return FileState.FOREIGN
        current = path.read_bytes()
    except FileNotFoundError:
        return FileState.NEW
    except OSError as error:
        raise _install_error(path, error) from None
    if current == content:
        return FileState.UNCHANGED
    return FileState.CHANGED if is_ours(current) else FileState.FOREIGN


def install(path: Path, content: bytes) -> FileState:
    """Have `content` at `path`, readable for everybody; a file that is not ours is left as it is.

    Whoever looks meanwhile, and whenever this is interrupted, sees the old file or the new one.

    Raises:
        InstallError: it cannot be written.
    """
    state = compare(path, content)
    if state in (FileState.NEW, FileState.CHANGED):
        try:
            _make_directory(path.parent)
            _write(path, content)
        except OSError as error:
            raise _install_error(path, error) from None
    return state


def remove(path: Path, *, dry_run: bool) -> FileState:
    """Remove the file; one that is not ours is left as it is.

    Raises:
        InstallError: it cannot be removed.
    """
    state = compare(path, b"")
    if state is FileState.NEW:
        return FileState.ABSENT
    if state is not FileState.CHANGED:  # somebody else's, or empty
        return FileState.FOREIGN
    if not dry_run:
        unlink(path)
    return FileState.REMOVED


def unlink(path: Path) -> None:
    """Remove the file or link.

    Raises:
        InstallError: it cannot be removed.
    """
    try:
        path.unlink()
    except OSError as error:
        raise _install_error(path, error) from None


def install_planned(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    """Have the planned files below `prefix`.

    Yields:
        What became of each.

    Raises:
        InstallError: one cannot be written.
    """
    for each in planned:
        path = prefix / each.path.relative_to("/")
        yield (compare if dry_run else install)(path, each.content), path


def remove_planned(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    """Remove the planned files below `prefix`, and the links by which systemctl has enabled them.

    Yields:
        What became of each that was there.

    Raises:
        InstallError: one cannot be removed.
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


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir()
        directory.chmod(0o755)  # whatever the umask is: services and `man` have to look into it


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=str(path.parent), delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(file.name).unlink()
            raise


def _install_error(path: Path, error: OSError) -> InstallError:
    if isinstance(error, PermissionError):
        return WriteNotAllowed(f"{path}: {error.strerror}; run this as root, with sudo")
    return InstallError(f"{path}: {error.strerror}")
