"""The files that make weightd a systemd service: where each one is installed, and how it is written or removed.

The plan is derived from the contents of the source directories, so a new unit file needs no change here. Each file is
written atomically, and never replaces a file that the user has written.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from enum import Enum
from pathlib import Path
from typing import Collection, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from weightctl import exit_codes
from weightctl.command import CommandError
from weightd_protocol.errors import Internal, PermissionDenied, Unavailable

_UNITS = (".service", ".socket", ".slice", ".target", ".timer", ".path")
UNIT_DIRECTORY = Path("etc/systemd/system")
_EXAMPLES = Path("usr/local/share/doc/weightd/examples")

CONFIGURATION = Path("/etc/weightd/weightd.toml")
GATEWAY_CONFIGURATION = Path("/etc/weightd/gateway.toml")

# The path of a program in an Exec line of a packaged unit. install-units replaces the path by the path of the program
# in this installation.
_PROGRAM = re.compile(rb"(?m)^(Exec\w+=.*?)/usr/bin/(weightd|weightctl)(?![\w-])")

_MARKER = "weightctl install-units"

_HINT = (
    "the daemon needs Python 3.10 or later: `pip install './weightd[daemon]'` (from a checkout) in an environment with "
    "it, such as /opt/weightd, and run the weightctl of that one"
)

# Directories that the service cannot see, because the unit hides them (ProtectHome=, PrivateTmp=). Other users usually
# cannot access them anyway.
_HIDDEN_DIRECTORIES = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - nothing is written there

# Matches paths without characters that have a special meaning in unit files: blanks, quotes, % and $.
_SAFE_PATH = re.compile(r"[A-Za-z0-9_/.,:@+=-]+")

_TIMEOUT_S = 60.0


class NoProgram(CommandError):
    """No usable program weightd was found.

    The error text gives the searched directories or the failure, and a remedy.
    """

    status = exit_codes.UNAVAILABLE
    code = Unavailable.code


class PlannedFile(NamedTuple):
    """A file that will be installed.

    Attributes:
        path: the absolute path of the file on the target system.
        content: the content of the file.
    """

    path: Path
    content: bytes


def find_weightd() -> Path:
    """Return the absolute path of weightd.

    Raises:
        NoProgram: weightd is missing, or its path contains characters that unit files cannot express.
    """
    # The directory of the running weightctl comes first: pip may install programs outside the directory of the
    # interpreter.
    directories = [
        Path(sys.argv[0]).absolute().parent,
        Path(sys.executable).parent,
        Path(sysconfig.get_path("scripts")),
    ]
    for directory in directories:
        path = directory / "weightd"
        if path.is_file() and os.access(str(path), os.X_OK):
            if not _SAFE_PATH.fullmatch(str(path)):
                raise NoProgram(f"{path}: expected a path of ASCII letters, digits and _/.,:@+=-, for systemd")
            return path
    searched = " or ".join(dict.fromkeys(map(str, directories)))
    raise NoProgram(f"there is no weightd in {searched}; {_HINT}")


def check_runs(weightd: Path) -> None:
    """Check that `weightd --version` succeeds, to detect a broken installation before units refer to it.

    Raises:
        NoProgram: the program fails. The error text contains the last line of its error output.
    """
    try:
        done = subprocess.run(
            [str(weightd), "--version"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise NoProgram(f"{weightd}: {error.strerror}; {_HINT}") from None
    except subprocess.TimeoutExpired:
        raise NoProgram(f"{weightd} --version did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        cause = words[-1] if words else f"exit status {done.returncode}"
        raise NoProgram(f"the daemon of this installation does not run on {sys.executable}: {cause}; {_HINT}")


def hidden_directory(program: Path) -> str:
    """Return the directory that hides `program` from the service, such as /home; "" if no directory hides it."""
    for path in (str(program), os.path.realpath(str(program)), os.path.realpath(sys.executable), __file__):
        for directory in _HIDDEN_DIRECTORIES:
            if path.startswith(f"{directory}/"):
                return directory
    return ""


def source(name: str) -> Path:
    """Return the source directory "systemd" or "manual": the one in this package, or else the one in the repository."""
    packed = Path(__file__).with_name(name)
    return packed if packed.is_dir() else Path(__file__).resolve().parents[3] / name


def make_plan(units: Path, manual: Path, program: Path) -> List[PlannedFile]:
    """Return the files to install.

    Args:
        units: the source directory with the unit files, sysusers.d/, tmpfiles.d/ and examples/.
        manual: the source directory with man/, completions/ and examples/.
        program: the path of the weightd that the units start. Its directory contains weightctl, too.
    """
    return [
        PlannedFile(Path("/") / target, add_notice(target, _with_program_path(program, path.read_bytes())))
        for path, target in sorted([*_units(units), *_manual(manual)], key=lambda pair: pair[1])
    ]


def _units(units: Path) -> Iterator[Tuple[Path, Path]]:
    for path in _files(units):
        if path.suffix in _UNITS:
            yield path, UNIT_DIRECTORY / path.name
    for kind in ("sysusers.d", "tmpfiles.d"):
        for path in _files(units / kind):
            yield path, Path("etc") / kind / path.name
    yield from _examples(units)


def _manual(manual: Path) -> Iterator[Tuple[Path, Path]]:
    for path in _files(manual / "man"):
        yield path, Path(f"usr/local/share/man/man{path.suffix[1:]}", path.name)
    for path in _files(manual / "completions"):
        yield path, Path("usr/local/share/bash-completion/completions", path.name)
    yield from _examples(manual)


def _examples(directory: Path) -> Iterator[Tuple[Path, Path]]:
    # Examples are installed in a directory for documentation, where they have no effect.
    for path in (directory / "examples").glob("**/*"):
        if path.is_file():
            yield path, _EXAMPLES / path.relative_to(directory / "examples")


def _files(directory: Path) -> Iterable[Path]:
    return (path for path in directory.glob("*") if path.is_file())


def _with_program_path(program: Path, content: bytes) -> bytes:
    directory = bytes(program.parent)
    return _PROGRAM.sub(lambda found: found.group(1) + directory + b"/" + found.group(2), content)


def add_notice(target: Path, content: bytes) -> bytes:
    """Return `content` with a comment in front which says that install-units has written the file."""
    notice = f"Written by {_MARKER}, which overwrites changes"
    if target.suffix in _UNITS:
        notice += f": use a drop-in instead (systemctl edit {target.name})"
    if _EXAMPLES in target.parents:
        # The user may copy an example and edit the copy, so the text must not say that changes are overwritten.
        notice = f"From the examples of {_MARKER}"
    comment = '.\\"' if "man" in target.parts else "#"
    return f"{comment} {notice}.\n".encode() + content


def is_ours(content: bytes) -> bool:
    """Return whether install-units has written a file: whether it begins with the comment of `add_notice`."""
    return _MARKER.encode() in content.partition(b"\n")[0]


def units_to_enable(planned: Iterable[PlannedFile]) -> List[str]:
    """Return the units that the user should enable, sockets first.

    They have an [Install] section and are no templates.
    """
    units = [
        each.path.name
        for each in planned
        if each.path.suffix in _UNITS and b"\n[Install]" in each.content and "@" not in each.path.name
    ]
    return sorted(units, key=lambda name: (not name.endswith(".socket"), name))


class InstallError(CommandError):
    """A file cannot be read, written or removed. The error text names the file."""

    status = exit_codes.CANNOT_WRITE
    code = Internal.code


class WriteNotAllowed(InstallError):
    """This user may not write to a path. The error text names the path."""

    status = exit_codes.NO_PERMISSION
    code = PermissionDenied.code


class FileState(Enum):
    """Result of installing or removing a file; with `--dry-run`, the expected result."""

    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    REMOVED = "removed"
    ABSENT = "absent"
    # A file that install-units did not write: a file of the user, or a link that `systemctl mask` has created.
    FOREIGN = "kept"


def compare(path: Path, content: bytes) -> FileState:
    """Return what `install` would do with the file at `path`.

    Raises:
        InstallError: the existing file cannot be read.
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
    """Write `content` to `path`, readable by everyone. Keep an existing file that install-units did not write.

    The file is replaced atomically: readers see either the old or the new content, even if this process is interrupted.

    Raises:
        InstallError: the file cannot be written.
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
    """Remove the file at `path`. Keep a file that install-units did not write.

    Raises:
        InstallError: the file cannot be removed.
    """
    state = compare(path, b"")
    if state is FileState.NEW:
        return FileState.ABSENT
    # Keep a file that install-units has not written. An empty file has the state UNCHANGED, and is also kept.
    if state is not FileState.CHANGED:
        return FileState.FOREIGN
    if not dry_run:
        unlink(path)
    return FileState.REMOVED


def unlink(path: Path) -> None:
    """Remove a file or a link.

    Raises:
        InstallError: the file or link cannot be removed.
    """
    try:
        path.unlink()
    except OSError as error:
        raise _install_error(path, error) from None


def install_planned(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    """Install the planned files below `prefix`. With `dry_run`, only find out what would be done.

    Yields:
        The state and path of each file.

    Raises:
        InstallError: a file cannot be written.
    """
    for each in planned:
        path = prefix / each.path.relative_to("/")
        yield (compare if dry_run else install)(path, each.content), path


def remove_planned(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    """Remove the planned files below `prefix`, and the links with which systemctl has enabled the units.

    Yields:
        The state and path of each file that existed.

    Raises:
        InstallError: a file cannot be removed.
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
    """Yield the links to these units, or to instances of these templates, in the .wants directories."""
    for link in directory.glob("*.wants/*"):
        if link.is_symlink() and Path(os.readlink(str(link))).name in units:
            yield link


def _prune(prefix: Path, directory: Path) -> None:
    """Remove directories of weightd that are now empty."""
    with contextlib.suppress(OSError):
        while "weightd" in directory.parts:
            (prefix / directory).rmdir()
            directory = directory.parent


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir()
        directory.chmod(0o755)  # The mode must not depend on the umask: services and `man` need access


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
