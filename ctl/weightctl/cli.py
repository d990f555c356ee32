"""The command line of `weightctl`: parses arguments, runs the command and reports errors."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from typing import Dict, List, Optional

from weightctl import exit_codes, journal, keygen, lifecycle, metrics, models, operations, rollout, status
from weightctl.advise import command as advise
from weightctl.bench import command as bench
from weightctl.command import Command, CommandError, DaemonUnreachable
from weightctl.install import command as install
from weightctl.predict import command as predict
from weightctl.text import clean_lines
from weightctl.top import command as top
from weightd.client import Client
from weightd.session import DEFAULT_TIMEOUT_S
from weightd_common.commandline import Parser
from weightd_common.log_text import add_priority, is_connected_to_journal
from weightd_common.terminal import redelivering_interrupts
from weightd_protocol import limits
from weightd_protocol.errors import RequestError, WeightdError
from weightd_protocol.version import VERSION

COMMANDS: Dict[str, Command] = {
    "status": status.COMMAND,
    "top": top.COMMAND,
    "metrics": metrics.COMMAND,
    "models": models.MODELS_COMMAND,
    "metadata": models.METADATA_COMMAND,
    "health": models.HEALTH_COMMAND,
    "predict": predict.COMMAND,
    "events": journal.EVENTS_COMMAND,
    "logs": journal.LOGS_COMMAND,
    "bench": bench.COMMAND,
    "advise": advise.COMMAND,
    "load": lifecycle.LOAD_COMMAND,
    "unload": lifecycle.UNLOAD_COMMAND,
    "retry": lifecycle.RETRY_COMMAND,
    "restart": lifecycle.RESTART_COMMAND,
    "rollout": rollout.COMMAND,
    "update": operations.UPDATE_COMMAND,
    "update-weights": operations.WEIGHTS_COMMAND,
    "reload": operations.RELOAD_COMMAND,
    "keygen": keygen.COMMAND,
    "install-units": install.COMMAND,
}

# File descriptor of stderr, and the syslog priority of errors there. When systemd runs `weightctl reload`, the journal
# shows errors with this priority.
_STDERR_FD, _PRIORITY_ERROR = 2, 3

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the command that `arguments` name (default: the process's arguments), and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        # Escape characters of a name or path that the terminal's encoding cannot represent.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with redelivering_interrupts():
                return _run(parser().parse_args(arguments))
        finally:
            if hasattr(sys.stdout, "flush"):  # sys.stdout is None if the parent process has closed stdout
                sys.stdout.flush()
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return exit_codes.BROKEN_PIPE
    except OSError as error:
        _discard_stdout()
        print(f"weightctl: cannot write the output: {error.strerror}", file=sys.stderr)
        return exit_codes.CANNOT_WRITE


def _run(options: argparse.Namespace) -> int:
    try:
        command: Command = options.command
        return command.run(options, lambda: _connect(options))
    except CommandError as error:
        _print_error(error.code, error, as_json=options.json)
        return error.status
    except RequestError as error:
        _print_error(error.code, error, as_json=options.json)
        return exit_codes.ERROR
    except WeightdError as error:
        _print_error("PROTOCOL", error, as_json=options.json)
        return exit_codes.PROTOCOL


def _connect(options: argparse.Namespace) -> Client:
    try:
        keys = {"key": options.key, "server_key": options.server_key}
        return Client(options.socket or None, timeout=options.timeout, tenant=options.tenant, **keys)
    except RequestError as error:
        raise DaemonUnreachable(error) from None


def _print_error(code: str, error: WeightdError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"code": code, "text": str(error)}}))
    else:
        text = f"{code}: {clean_lines(str(error))}"
        print(
            add_priority(text, _PRIORITY_ERROR) if is_connected_to_journal(os.environ, _STDERR_FD) else text,
            file=sys.stderr,
        )


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null after a write error.

    Otherwise the interpreter would flush stdout at exit, fail again and print another error.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = Parser(
        prog="weightctl",
        description="Queries and controls a running weightd.",
        epilog=exit_codes.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weightctl {VERSION}")
    _add_common(parser, {"socket": "", "timeout": DEFAULT_TIMEOUT_S, "json": False})
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="name")
    subparsers.required = True
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=command.help,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # The common options may precede or follow the command. If an option occurs twice, the last value counts.
        _add_common(sub, {})
        command.add_arguments(sub)
        sub.set_defaults(command=command, fail=sub.error)
    return parser


def _add_common(parser: argparse.ArgumentParser, defaults: Dict[str, object]) -> None:
    """Declare the common options. Without `defaults`, an absent option keeps the value given before the command."""
    default = defaults.get if defaults else _suppress_default
    parser.add_argument(
        "--socket",
        default=default("socket"),
        metavar="ADDRESS",
        help="address of the daemon: /PATH for its Unix or ZeroMQ socket, unix:///PATH for the Unix socket only, "
        "ipc:///PATH or tcp://HOST:PORT for ZeroMQ only (default: $WEIGHTD_SOCKET, otherwise this user's daemon "
        "or, if that does not listen, the system's)"
        if defaults
        else "address of the daemon, see weightctl --help",
    )
    parser.add_argument(
        "--timeout",
        default=default("timeout"),
        type=_parse_seconds,
        metavar="S",
        help=f"seconds to wait for the response (default: {DEFAULT_TIMEOUT_S:g})",
    )
    parser.add_argument("--json", action="store_true", default=default("json"), help="print one JSON object")
    parser.add_argument(
        "--key", default=default("key"), metavar="FILE", help="secret key of this client, for a CURVE listener"
    )
    parser.add_argument(
        "--server-key", default=default("server_key"), metavar="FILE", help="public key of the CURVE listener"
    )
    parser.add_argument("--tenant", default=default("tenant"), metavar="NAME", help="act for this tenant, if permitted")


def _suppress_default(_: str) -> object:
    return argparse.SUPPRESS


def _parse_seconds(argument: str) -> float:
    try:
        seconds = float(argument)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"expected more than 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, got {argument!r}"
        )
    return seconds
