"""Which file goes where, by what the directories hold: a new unit needs no word here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Tuple

_UNITS = (".service", ".socket", ".slice", ".target", ".timer", ".path")
UNIT_DIRECTORY = Path("etc/systemd/system")
_EXAMPLES = Path("usr/local/share/doc/weightd/examples")

CONFIGURATION = Path("/etc/weightd/weightd.toml")
GATEWAY_CONFIGURATION = Path("/etc/weightd/gateway.toml")

# What a line that starts something calls, in a unit as it is kept.
_PROGRAM = re.compile(rb"(?m)^(Exec\w+=.*?)/usr/bin/(weightd|weightctl)(?![\w-])")


class PlannedFile(NamedTuple):
    """A file to be.

    Attributes:
        path: where, absolute on the system that it is for.
        content: all of it.
    """

    path: Path
    content: bytes


def units_source() -> Path:
    """Return the directory of the units: packed beside this file, or the repository's where that is installed."""
    packed = Path(__file__).with_name("systemd")
    return packed if packed.is_dir() else Path(__file__).resolve().parents[3] / "systemd"


def make_plan(units: Path, manual: Path, program: Path) -> List[PlannedFile]:
    """Return the files of a service.

    Args:
        units: what `units_source` returns.
        manual: a directory of man/, completions/ and examples/.
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


_MARKER = "weightctl install-units"


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
