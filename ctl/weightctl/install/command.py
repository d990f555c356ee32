"""The command: its arguments, the order of things, and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from weightctl import exit_codes, manual
from weightctl.command import Command, Connect
from weightctl.install import program
from weightctl.install.files import FileState, InstallError, compare, install
from weightctl.install.plan import (
    CONFIGURATION,
    GATEWAY_CONFIGURATION,
    PlannedFile,
    make_plan,
    units_source,
    units_to_enable,
)
from weightctl.install.uninstall import NEXT_STEPS, REMAINING_NOTE, remove_planned
from weightctl.text import clean

_DESCRIPTION = """\
Makes weightd a service of systemd: writes its units, user, groups and directories to /etc, and man
pages, completion for bash, and examples below /usr/local/share. The units start the weightd of the
installation that this weightctl belongs to. It asks no daemon, starts nothing, and prints what to
run next.

  sudo /opt/weightd/bin/weightctl install-units

Run it again after an upgrade: for each file it tells whether it is new, changed or unchanged, or
kept: somebody else has written it, or made a link of it. Configurations and drop-ins are yours, and
are never touched.

--remove takes all of it away again, and disables the units. It stops nothing.

Exit status: 0 every file is in place or gone, 1 one was kept, 69 there is no daemon in this
installation, 74 a file cannot be written, 77 permission denied."""

_EXAMPLE_PATH = "/usr/local/share/doc/weightd/examples/weightd.toml"


class _Step(NamedTuple):
    """A command to run next, and why."""

    command: str
    reason: str


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        default="/",
        metavar="DIR",
        help="the root of the system that the files are for, to make a package or an image (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would be done, and change nothing")
    parser.add_argument("--remove", action="store_true", help="remove what this command has written")


def _run(options: argparse.Namespace, _: Connect) -> int:
    prefix = Path(options.prefix).absolute()
    weightd = program.find_weightd()
    planned = _make_plan(weightd, options.parser)
    if options.remove:
        actions = remove_planned(planned, prefix, dry_run=options.dry_run)
    else:
        actions = _install(planned, prefix, dry_run=options.dry_run)
    done: List[Tuple[FileState, Path]] = []
    for state, path in actions:
        done.append((state, path))
        if not options.json:
            print(f"{state.value:<9}  {clean(str(path))}")
    if options.remove:
        steps = [_Step(*each) for each in NEXT_STEPS]
    else:
        steps = list(_next_steps(planned, prefix, changed=any(state is FileState.CHANGED for state, _ in done)))
    notes = list(_notes(done, weightd, options))
    if options.json:
        print(json.dumps(_as_json(done, steps, notes)))
    else:
        _print_steps(steps, notes)
    return exit_codes.ERROR if any(state is FileState.FOREIGN for state, _ in done) else exit_codes.OK


def _install(planned: Sequence[PlannedFile], prefix: Path, *, dry_run: bool) -> Iterator[Tuple[FileState, Path]]:
    install_file = compare if dry_run else install
    for each in planned:
        path = prefix / each.path.relative_to("/")
        yield install_file(path, each.content), path


COMMAND = Command("make weightd a service of systemd", _DESCRIPTION, _add_arguments, _run)


def _make_plan(weightd: Path, parser: argparse.ArgumentParser) -> List[PlannedFile]:
    try:
        with tempfile.TemporaryDirectory(prefix="weightctl-") as name:
            directory = Path(name)
            program.write_manual(name)
            (directory / "man" / "weightctl.1").write_text(manual.page(parser), "utf-8")
            (directory / "completions" / "weightctl").write_text(manual.bash_completion(parser), "utf-8")
            return make_plan(units_source(), directory, weightd)
    except OSError as error:
        raise InstallError(f"cannot prepare the files: {error}") from None


def _next_steps(planned: Sequence[PlannedFile], prefix: Path, *, changed: bool) -> Iterator[_Step]:
    users = [each.path.name for each in planned if each.path.parent.name == "sysusers.d"]
    directories = [each.path.name for each in planned if each.path.parent.name == "tmpfiles.d"]
    commands = [f"systemd-sysusers {' '.join(users)}"] if users else []
    commands += [f"systemd-tmpfiles --create {' '.join(directories)}"] if directories else []
    if commands:
        yield _Step(" && ".join(commands), "the user, the group of those who may connect, and where the socket is")
    yield _Step("systemctl daemon-reload", "")
    if not (prefix / CONFIGURATION.relative_to("/")).exists():
        yield _Step(
            f"install -D -m 644 {_EXAMPLE_PATH} {CONFIGURATION}",
            "there is none yet: then name your models in it, and see `weightd check`",
        )
    units = units_to_enable(planned)
    gateway = [unit for unit in units if unit.startswith("weightd-gateway.")]
    yield _Step(f"systemctl enable --now {' '.join(unit for unit in units if unit not in gateway)}", "")
    # It speaks with other programs: nobody gets it unasked.
    if gateway and (prefix / GATEWAY_CONFIGURATION.relative_to("/")).exists():
        yield _Step(f"systemctl enable --now {' '.join(gateway)}", f"HTTP and gRPC, by {GATEWAY_CONFIGURATION}")
    if changed:
        yield _Step("systemctl try-restart weightd.service weightd-gateway.service", "where they run already")


def _notes(done: Sequence[Tuple[FileState, Path]], weightd: Path, options: argparse.Namespace) -> Iterator[str]:
    for state, path in done:
        if state is FileState.FOREIGN:
            hint = "" if options.remove else " Move it away to have weightd's own."
            yield f"{path} was kept: install-units did not write it.{hint}"
    hidden = program.hidden_directory(weightd)
    if options.remove:
        yield REMAINING_NOTE
    elif hidden:
        yield (
            f"the service cannot see below {hidden}, where this installation or its Python is: install weightd in a "
            "directory that every user may read, such as /opt/weightd, and run the weightctl there."
        )
    if options.dry_run:
        yield "nothing was changed: --dry-run."


def _as_json(done: Sequence[Tuple[FileState, Path]], steps: Sequence[_Step], notes: Sequence[str]) -> object:
    return {
        "files": [{"path": str(path), "state": state.value} for state, path in done],
        "next": [step.command for step in steps],
        "notes": list(notes),
    }


def _print_steps(steps: Sequence[_Step], notes: Sequence[str]) -> None:
    print("\nNext, as root of the system that they are for:\n")
    for step in steps:
        print(f"  # {step.reason}\n  {step.command}" if step.reason else f"  {step.command}")
    sys.stdout.flush()
    for note in notes:
        print(f"weightctl: {clean(note)}", file=sys.stderr)
