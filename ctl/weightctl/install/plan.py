"""Which files make weightd a service, where each goes, and the weightd that the units start.

What the directories of units and manual hold says which file goes where: a new unit needs no word here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Tuple

from weightctl import exit_codes
from weightctl.command import CommandError
from weightd_protocol.errors import Unavailable

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
