"""weightd(8), weightctl(1) and their shell completion, from `--help` and additional texts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tools.manual import completion
from tools.manual.commands import ProgramCommand, read_parser
from tools.manual.page import ManPage, write_program

from weightctl import cli as weightctl_cli
from weightctl import exit_codes as weightctl_exit_codes
from weightd_daemon import cli as weightd_cli
from weightd_daemon import exit_codes as weightd_exit_codes

# What the shell offers for a metavar.
_WEIGHTD_COMPLETIONS: Mapping[str, str] = {
    "CONFIG": completion.FILE,
    "MODEL": completion.FILE,
    "FILE": completion.FILE,
    "FILE.mindir": completion.FILE,
    "DIR": completion.DIRECTORY,
}

_WEIGHTCTL_COMPLETIONS: Mapping[str, str] = {
    "MODEL": completion.MODEL,
    "NEW_PATH": completion.FILE,
    "WEIGHTS.npz": completion.FILE,
    "FILE.npz": completion.FILE,
    "[NAME=]FILE": completion.FILE,
    "FILE": completion.FILE,
    "DIR": completion.DIRECTORY,
}

_SIGNALS: Mapping[str, str] = {
    "SIGTERM, SIGINT": (
        "Stop: nothing new is accepted, and what was accepted is finished within `drain_timeout`. A second one waits "
        "for no request. When the service is stopped, every process ends, and no file is left; when it is restarted, "
        "workers and holders live on, and the next daemon goes on with them."
    ),
    "SIGHUP": (
        "Read the configuration file again, as `weightctl reload` does. A file that is wrong changes nothing. `weightd "
        "run` has no file and stops, and so does a `weightd serve` or `weightd gateway` that was started in the "
        "foreground of a terminal which has closed. Under nohup(1) a closed terminal stops none of them."
    ),
}

WEIGHTD_ENVIRONMENT: Mapping[str, str] = {
    "WEIGHTD_SOCKET": "`weightd run`: where clients connect, unless --socket says so.",
    "RUNTIME_DIRECTORY": "From systemd: the default of `runtime_dir`, where the sockets are.",
    "CACHE_DIRECTORY": "From systemd: the default of `cache_dir`, where snapshots and page stores are.",
    "CONFIGURATION_DIRECTORY": "From systemd: where `weightd serve` looks for weightd.toml if it is given no file.",
    "NOTIFY_SOCKET": "From systemd: where it is told that the required models serve, of a reload, and of the end.",
    "WATCHDOG_USEC": (
        "From systemd: how often it wants to hear that the daemon goes on. It is told so only while each required "
        "model has a worker that makes progress, or is being loaded again."
    ),
    "LISTEN_FDS": (
        "From systemd: how many descriptors it passes, with LISTEN_PID and LISTEN_FDNAMES: the sockets on which "
        "clients connect (socket activation), one whose path ends in .unix for those of this host and others for those "
        "that speak ZeroMQ, and what leads to the processes of the daemon before this one."
    ),
    "JOURNAL_STREAM": "From systemd: stderr is the journal, so each line of the log begins with its priority.",
    "XDG_RUNTIME_DIR": "Without systemd and not as root: `runtime_dir` is weightd in it by default.",
    "XDG_CACHE_HOME": "Without systemd and not as root: `cache_dir` is weightd in it by default.",
    "ASCEND_HOME_PATH": "Where CANN is installed; `weightd doctor` looks there, and set_env.sh of CANN sets it.",
    "LD_LIBRARY_PATH": "Where `weightd doctor --ranks` looks for libhccl.so, as the loader of the processes does.",
    "ASCEND_RT_VISIBLE_DEVICES": "Which cards the processes see. CANN reads it, and weightd for rank tables.",
}

_WEIGHTD_FILES: Mapping[str, str] = {
    "/etc/weightd/weightd.toml": "The configuration, see weightd.toml(5).",
    "/run/weightd/weightd.sock.unix": "Where clients of this host connect; the group that may is the service's to set.",
    "/run/weightd/weightd.sock": "Where clients connect that speak ZeroMQ; likewise.",
    "/run/weightd/weightd.sock.lock": "The lock of the daemon on that socket; it holds the daemon's pid.",
    "/var/cache/weightd": (
        "Snapshots of the models, page stores and logs of the processes, below a directory named after the socket. "
        "Nothing in it has to be kept: a daemon that starts makes it anew."
    ),
}

_WEIGHTCTL_ENVIRONMENT: Mapping[str, str] = {
    "WEIGHTD_SOCKET": "Where the daemon listens, unless --socket says so.",
    "XDG_RUNTIME_DIR": (
        "The runtime directory of this user's own daemon is weightd in it. If no daemon listens there, weightctl "
        "connects to the system's daemon."
    ),
}

_WEIGHTCTL_FILES: Mapping[str, str] = {
    "/run/weightd/weightd.sock.unix": "Where the system's daemon listens.",
    "/run/weightd/weightd.sock": "The same for ZeroMQ.",
}


def weightd() -> ProgramCommand:
    """Return what the command line of weightd takes."""
    return read_parser(weightd_cli.parser())


def weightctl() -> ProgramCommand:
    """Return what the command line of weightctl takes."""
    program = read_parser(weightctl_cli.parser())
    commands = [_add_manual_text(command, weightctl_cli.COMMANDS[command.name].manual) for command in program.commands]
    # The epilog of the help is a short form of EXIT STATUS.
    return program._replace(epilog="", commands=tuple(commands))


def _add_manual_text(command: ProgramCommand, text: str) -> ProgramCommand:
    """Return the command with text that `--help` does not print, before its exit statuses."""
    if not text:
        return command
    summary, separator, statuses = command.description.partition("\n\nExit status: ")
    summary = re.sub(r"\s+See weightctl\(1\)[^.]*\.", "", summary)  # the page does not refer to itself
    return command._replace(description=f"{summary}\n\n{text}{separator}{statuses}")


def weightd_page() -> str:
    """Return weightd(8)."""
    page = ManPage("weightd", 8, "serve models from many processes that hold one copy of the weights")
    write_program(page, weightd())
    page.table("EXIT STATUS", {str(status): text for status, text in weightd_exit_codes.MEANINGS.items()})
    page.table("SIGNALS", _SIGNALS)
    page.table("ENVIRONMENT", WEIGHTD_ENVIRONMENT)
    page.table("FILES", _WEIGHTD_FILES)
    page.see_also([("weightctl", 1), ("weightd.toml", 5), ("systemctl", 1), ("journalctl", 1)])
    return page.source()


def weightctl_page() -> str:
    """Return weightctl(1)."""
    page = ManPage("weightctl", 1, "ask a running weightd, and change what it serves")
    write_program(page, weightctl())
    page.table("EXIT STATUS", {str(status): text for status, text in weightctl_exit_codes.MEANINGS.items()})
    page.table("ENVIRONMENT", _WEIGHTCTL_ENVIRONMENT)
    page.table("FILES", _WEIGHTCTL_FILES)
    page.see_also([("weightd", 8), ("weightd.toml", 5)])
    return page.source()


def weightd_completion() -> str:
    """Return the completion of weightd for bash."""
    return completion.bash_script(weightd(), _WEIGHTD_COMPLETIONS)


def weightctl_completion() -> str:
    """Return the completion of weightctl for bash."""
    return completion.bash_script(weightctl(), _WEIGHTCTL_COMPLETIONS)
