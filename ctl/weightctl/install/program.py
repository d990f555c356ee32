"""The weightd that belongs to this weightctl: where it is, and what it writes about itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from weightctl import exit_codes
from weightctl.command import CommandError
from weightd_protocol.errors import Unavailable

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


def write_manual(directory: str) -> None:
    """Have daemon and gateway of this installation write their manuals; it shows at the same time that they can run.

    Raises:
        NoProgram: they cannot; the text is the last word of the one that cannot.
    """
    for package in ("weightd_daemon.manual", "weightd_gateway.manpages"):
        _write_manual(package, directory)


def _write_manual(package: str, directory: str) -> None:
    command = [sys.executable, "-m", package, directory]
    try:
        # Elsewhere Python would import what lies in the working directory, with root's rights.
        done = subprocess.run(
            command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoProgram(f"{' '.join(command)} did not end within {_TIMEOUT_S:g} s") from None
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
