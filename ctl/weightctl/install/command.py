"""The command `weightctl install-units`: its arguments, its sequence and its output."""

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
Installs weightd as a systemd service: writes units, users, groups and directories to /etc, and man
pages, bash completion and examples to /usr/local/share. The units start the weightd of the
installation that contains this weightctl. The command does not contact a daemon and starts
nothing; it prints the commands to run next.

  sudo /opt/weightd/bin/weightctl install-units

Run it again after an upgrade. It reports each file as new, changed, unchanged or kept:
install-units keeps a file that it has not written, or that was replaced by a link. It never
changes configurations and drop-ins.

--remove removes all installed files and disables the units, but does not stop them.

Exit status: 0 every file was installed or removed, 1 a file was kept, 69 this installation has no
daemon, 74 a file cannot be written, 77 permission denied."""

_EXAMPLE_PATH = "/usr/local/share/doc/weightd/examples/weightd.toml"


class _Step(NamedTuple):
    """A command that the user should run next, and the reason for it."""

    command: str
    reason: str


_STEPS_AFTER_REMOVAL = (
    _Step(
        "systemctl stop 'weightd-metrics.*' 'weightd-gateway.*' weightd.socket weightd.service 'weightd@*'",
        "running services continue until then",
    ),
    _Step("systemctl daemon-reload", ""),
)

_REMAINING_NOTE = (
    "not removed: /etc/weightd, drop-ins, /var/cache/weightd, /var/lib/weightd, the users weightd and "
    "weightd-gateway, the group weightd-clients, and the environment in which weightd is installed"
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        default="/",
        metavar="DIR",
        help="root directory of the target system, for packages and images (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the changes without making them")
    parser.add_argument("--remove", action="store_true", help="remove the files that this command has written")


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


COMMAND = Command("install weightd as a systemd service", _DESCRIPTION, _add_arguments, _run)


def _next_steps(planned: Sequence[PlannedFile], prefix: Path, *, changed: bool) -> Iterator[_Step]:
    users = [each.path.name for each in planned if each.path.parent.name == "sysusers.d"]
    directories = [each.path.name for each in planned if each.path.parent.name == "tmpfiles.d"]
    commands = [f"systemd-sysusers {' '.join(users)}"] if users else []
    commands += [f"systemd-tmpfiles --create {' '.join(directories)}"] if directories else []
    if commands:
        yield _Step(
            " && ".join(commands), "create users, the group of permitted clients, and the directory of the sockets"
        )
    yield _Step("systemctl daemon-reload", "")
    if not (prefix / CONFIGURATION.relative_to("/")).exists():
        yield _Step(
            f"install -D -m 644 {_EXAMPLE_PATH} {CONFIGURATION}",
            "no configuration yet: add your models to it, then run `weightd check`",
        )
    units = plan.units_to_enable(planned)
    gateway = [unit for unit in units if unit.startswith("weightd-gateway.")]
    # These units serve programs other than weightd, so the user must enable them explicitly.
    optional = [*gateway, "weightd-metrics.service"]
    yield _Step(f"systemctl enable --now {' '.join(unit for unit in units if unit not in optional)}", "")
    if gateway and (prefix / GATEWAY_CONFIGURATION.relative_to("/")).exists():
        yield _Step(
            f"systemctl enable --now {' '.join(gateway)}", f"HTTP and gRPC, configured in {GATEWAY_CONFIGURATION}"
        )
    if changed:
        yield _Step(
            "systemctl try-restart weightd.service weightd-gateway.service weightd-metrics.service",
            "restart the running services",
        )


def _notes(done: Sequence[Tuple[FileState, Path]], weightd: Path, options: argparse.Namespace) -> Iterator[str]:
    for state, path in done:
        if state is FileState.FOREIGN:
            hint = "" if options.remove else "; move it away to install weightd's file"
            yield f"{path} was kept, because install-units did not write it{hint}"
    hidden = plan.hidden_directory(weightd)
    if options.remove:
        yield _REMAINING_NOTE
    elif hidden:
        yield (
            f"the service cannot access {hidden}, which contains this installation or its Python: install weightd in a "
            "directory that every user may read, such as /opt/weightd, and run weightctl from there"
        )
    if options.dry_run:
        yield "nothing was changed (--dry-run)"


def _as_json(done: Sequence[Tuple[FileState, Path]], steps: Sequence[_Step], notes: Sequence[str]) -> object:
    return {
        "files": [{"path": str(path), "state": state.value} for state, path in done],
        "next": [step.command for step in steps],
        "notes": list(notes),
    }


def _print_steps(steps: Sequence[_Step], notes: Sequence[str]) -> None:
    print("\nRun next, as root on the target system:\n")
    for step in steps:
        print(f"  # {step.reason}\n  {step.command}" if step.reason else f"  {step.command}")
    sys.stdout.flush()
    for note in notes:
        print(f"weightctl: {clean(note)}", file=sys.stderr)
