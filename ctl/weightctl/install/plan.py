"""The files that make weightd a service: which there are, where each goes, and how it is written or removed.

What the directories of units and manual hold says which file goes where: a new unit needs no word here. A file is
written whole or not at all, and only where nothing else stands.
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

# What a line that starts something calls, in a unit as it is kept.
_PROGRAM = re.compile(rb"(?m)^(Exec\w+=.*?)/usr/bin/(weightd|weightctl)(?![\w-])")

_MARKER = "weightctl install-units"

_HINT = (
    "the daemon needs Python 3.10 or later: `pip install 'weightd[daemon]'` in an environment with it, such as "
    "/opt/weightd, and run the weightctl of that one"
)

# The unit hides them from the service (ProtectHome=, PrivateTmp=), and other users may not enter them anyway.
_HIDDEN_DIRECTORIES = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - nothing is written there

# What systemd would take for more than a name: blanks, quotes, % and $.
_SAFE_PATH = re.compile(r"[A-Za-z0-9_/.,:@+=-]+")

_TIMEOUT_S = 60.0


class NoProgram(CommandError):
    """There is no weightd that the units could start; the text says where it was looked for, and what to do."""

    status = exit_codes.UNAVAILABLE
    code = Unavailable.code


class PlannedFile(NamedTuple):
    """A file to be.

    Attributes:
        path: where, absolute on the system that it is for.
        content: all of it.
    """

    path: Path
    content: bytes


def find_weightd() -> Path:
    """Return the absolute path of weightd.

    Raises:
        NoProgram: it is not there, or systemd could not be told where it is.
    """
    # Beside this weightctl, which pip may have put elsewhere than its interpreter is.
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
    """Have the weightd that the units shall start say its version, so that an installation that cannot run is found.

    Raises:
        NoProgram: it does not run; the text is its last word.
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
    """Return the directory because of which the service could not start `program`, "" if there is none."""
    for path in (str(program), os.path.realpath(str(program)), os.path.realpath(sys.executable), __file__):
        for directory in _HIDDEN_DIRECTORIES:
            if path.startswith(f"{directory}/"):
                return directory
    return ""


def source(name: str) -> Path:
    """Return the directory "systemd" or "manual": the one packed beside this file, or that of the repository."""
    packed = Path(__file__).with_name(name)
    return packed if packed.is_dir() else Path(__file__).resolve().parents[3] / name


def make_plan(units: Path, manual: Path, program: Path) -> List[PlannedFile]:
    """Return the files of a service.

    Args:
        units: the directory of units, sysusers.d/, tmpfiles.d/ and examples/.
        manual: the directory of man/, completions/ and examples/.
        program: the weightd that the units shall start; weightctl is beside it.
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
    # Not where they would be in force.
    for path in (directory / "examples").glob("**/*"):
        if path.is_file():
            yield path, _EXAMPLES / path.relative_to(directory / "examples")


def _files(directory: Path) -> Iterable[Path]:
    return (path for path in directory.glob("*") if path.is_file())


def _with_program_path(program: Path, content: bytes) -> bytes:
    directory = bytes(program.parent)
    return _PROGRAM.sub(lambda found: found.group(1) + directory + b"/" + found.group(2), content)


def add_notice(target: Path, content: bytes) -> bytes:
    """Return `content` below a comment that says whose the file is."""
    notice = f"Written by {_MARKER}, which will write it again"
    if target.suffix in _UNITS:
        notice += f": changes belong into a drop-in (systemctl edit {target.name})"
    if _EXAMPLES in target.parents:
        notice = f"From the examples of {_MARKER}"  # which is true of a copy, too
    comment = '.\\"' if "man" in target.parts else "#"
    return f"{comment} {notice}.\n".encode() + content


def is_ours(content: bytes) -> bool:
    """Whether a file bears the comment."""
    return _MARKER.encode() in content.partition(b"\n")[0]


def units_to_enable(planned: Iterable[PlannedFile]) -> List[str]:
    """Return the units to enable, sockets first: those that say what wants them, and are no templates."""
    units = [
        each.path.name
        for each in planned
        if each.path.suffix in _UNITS and b"\n[Install]" in each.content and "@" not in each.path.name
    ]
    return sorted(units, key=lambda name: (not name.endswith(".socket"), name))


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
