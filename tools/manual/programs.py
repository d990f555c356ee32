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

# Completions of the arguments, by metavar.
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
        "Stop: the daemon rejects new requests and finishes the accepted ones within `drain_timeout`. After a second "
        "signal it does not wait for requests. If the service is stopped, all processes exit and the daemon removes "
        "its files except the usage counters. If the service is restarted, workers and holders continue, and the next "
        "daemon takes them over."
    ),
    "SIGHUP": (
        "Read the configuration file again, as `weightctl reload` does; an invalid file changes nothing. `weightd "
        "run` has no file and stops. `weightd serve` and `weightd gateway` stop if they run in the foreground of a "
        "terminal that has closed. Under nohup(1) a closed terminal stops none of these programs."
    ),
}

WEIGHTD_ENVIRONMENT: Mapping[str, str] = {
    "WEIGHTD_SOCKET": "`weightd run`: the address for clients, unless --socket is given.",
    "RUNTIME_DIRECTORY": "From systemd: the default of `runtime_dir`, the directory of the sockets.",
    "CACHE_DIRECTORY": "From systemd: the default of `cache_dir`, the directory of snapshots and page stores.",
    "CONFIGURATION_DIRECTORY": "From systemd: the directory of weightd.toml if `weightd serve` is run without a file.",
    "NOTIFY_SOCKET": (
        "From systemd: the socket to which weightd reports that the required models serve, that it reloads, and that "
        "it stops."
    ),
    "WATCHDOG_USEC": (
        "From systemd: the interval within which systemd expects a sign of life. weightd sends it only while each "
        "required model has a worker that makes progress, or is being loaded again."
    ),
    "LISTEN_FDS": (
        "From systemd: the number of file descriptors that it passes, described by LISTEN_PID and LISTEN_FDNAMES: the "
        "sockets for clients (socket activation; the path of the socket for clients without ZeroMQ ends in .unix), and "
        "the descriptors through which weightd takes over the processes of the previous daemon."
    ),
    "JOURNAL_STREAM": "From systemd: if stderr is the journal, each line of the log begins with its priority.",
    "XDG_RUNTIME_DIR": "Without systemd, not as root: `runtime_dir` defaults to weightd in this directory.",
    "XDG_CACHE_HOME": "Without systemd, not as root: `cache_dir` defaults to weightd in this directory.",
    "ASCEND_HOME_PATH": "The directory of CANN, which CANN's set_env.sh sets; `weightd doctor` searches it.",
    "LD_LIBRARY_PATH": "The directories that the dynamic loader and `weightd doctor --ranks` search for libhccl.so.",
    "ASCEND_RT_VISIBLE_DEVICES": "The cards that processes can use. CANN reads it; weightd does for rank tables.",
}

_WEIGHTD_FILES: Mapping[str, str] = {
    "/etc/weightd/weightd.toml": "The configuration, see weightd.toml(5).",
    "/run/weightd/weightd.sock.unix": "The socket for clients on this host; weightd.socket sets its group.",
    "/run/weightd/weightd.sock": "The socket for ZeroMQ clients; weightd.socket sets its group.",
    "/run/weightd/weightd.sock.lock": "The daemon's lock on this socket; the file contains the pid.",
    "/var/cache/weightd": (
        "Snapshots of the models, page stores and logs of the processes, below a directory named after the socket. "
        "It may be removed while weightd is stopped; the next daemon creates it again."
    ),
}

_WEIGHTCTL_ENVIRONMENT: Mapping[str, str] = {
    "WEIGHTD_SOCKET": "The address of the daemon, unless --socket is given.",
    "XDG_RUNTIME_DIR": (
        "The runtime directory of this user's own daemon is weightd in it. If no daemon listens there, weightctl "
        "connects to the system's daemon."
    ),
}

_WEIGHTCTL_FILES: Mapping[str, str] = {
    "/run/weightd/weightd.sock.unix": "The socket of the system's daemon.",
    "/run/weightd/weightd.sock": "Its socket for ZeroMQ clients.",
}


def weightd() -> ProgramCommand:
    """Return the command line of weightd."""
    return read_parser(weightd_cli.parser())


def weightctl() -> ProgramCommand:
    """Return the command line of weightctl."""
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
    page = ManPage("weightd", 8, "serve models from worker processes that share one copy of the weights")
    write_program(page, weightd())
    page.table("EXIT STATUS", {str(status): text for status, text in weightd_exit_codes.MEANINGS.items()})
    page.table("SIGNALS", _SIGNALS)
    page.table("ENVIRONMENT", WEIGHTD_ENVIRONMENT)
    page.table("FILES", _WEIGHTD_FILES)
    page.see_also([("weightctl", 1), ("weightd.toml", 5), ("systemctl", 1), ("journalctl", 1)])
    return page.source()


def weightctl_page() -> str:
    """Return weightctl(1)."""
    page = ManPage("weightctl", 1, "query and control a running weightd")
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
