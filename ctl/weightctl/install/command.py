"""`weightctl install-units`: arguments, sequence and output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple, Sequence, Tuple

from weightctl import exit_codes
from weightctl.command import Command, Connect
from weightctl.install import plan
from weightctl.install.plan import (
    CONFIGURATION,
    GATEWAY_CONFIGURATION,
    FileState,
    InstallError,
    PlannedFile,
    install_planned,
    remove_planned,
)
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
    """A command for the user to run next, and the reason."""

    command: str
    reason: str


_STEPS_AFTER_REMOVAL = (
    _Step(
        "systemctl stop 'weightd-metrics.*' 'weightd-gateway.*' weightd.socket weightd.service 'weightd@*'",
        "what runs goes on until then",
    ),
    _Step("systemctl daemon-reload", ""),
)

_REMAINING_NOTE = (
    "what is yours remains: /etc/weightd, drop-ins, /var/cache/weightd, /var/lib/weightd, the users weightd and "
    "weightd-gateway, the group weightd-clients, and the environment that weightd is installed in."
)


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
    weightd = plan.find_weightd()
    plan.check_runs(weightd)
    try:
        planned = plan.make_plan(plan.source("systemd"), plan.source("manual"), weightd)
    except OSError as error:
        raise InstallError(f"cannot prepare the files: {error}") from None
    handle = remove_planned if options.remove else install_planned
    done: List[Tuple[FileState, Path]] = []
    for state, path in handle(planned, prefix, dry_run=options.dry_run):
        done.append((state, path))
        if not options.json:
            print(f"{state.value:<9}  {clean(str(path))}")
    if options.remove:
        steps = list(_STEPS_AFTER_REMOVAL)
    else:
        steps = list(_next_steps(planned, prefix, changed=any(state is FileState.CHANGED for state, _ in done)))
    notes = list(_notes(done, weightd, options))
    if options.json:
        print(json.dumps(_as_json(done, steps, notes)))
    else:
        _print_steps(steps, notes)
    return exit_codes.ERROR if any(state is FileState.FOREIGN for state, _ in done) else exit_codes.OK


COMMAND = Command("make weightd a service of systemd", _DESCRIPTION, _add_arguments, _run)


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
    units = plan.units_to_enable(planned)
    gateway = [unit for unit in units if unit.startswith("weightd-gateway.")]
    # These serve other programs, so the user must enable them explicitly.
    optional = [*gateway, "weightd-metrics.service"]
    yield _Step(f"systemctl enable --now {' '.join(unit for unit in units if unit not in optional)}", "")
    if gateway and (prefix / GATEWAY_CONFIGURATION.relative_to("/")).exists():
        yield _Step(f"systemctl enable --now {' '.join(gateway)}", f"HTTP and gRPC, by {GATEWAY_CONFIGURATION}")
    if changed:
        yield _Step(
            "systemctl try-restart weightd.service weightd-gateway.service weightd-metrics.service",
            "where they run already",
        )


def _notes(done: Sequence[Tuple[FileState, Path]], weightd: Path, options: argparse.Namespace) -> Iterator[str]:
    for state, path in done:
        if state is FileState.FOREIGN:
            hint = "" if options.remove else " Move it away to have weightd's own."
            yield f"{path} was kept: install-units did not write it.{hint}"
    hidden = plan.hidden_directory(weightd)
    if options.remove:
        yield _REMAINING_NOTE
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
