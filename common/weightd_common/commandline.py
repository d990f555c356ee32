"""Argument parser of weightd's programs, and the command line of the gateway.

The gateway's arguments are declared here because two programs parse them: `weightd gateway`, and the gateway program
that `weightd gateway` then executes.
"""

from __future__ import annotations

import argparse
import sys
from typing import List, NoReturn

EXIT_USAGE = 64
"""EX_USAGE of sysexits.h: invalid command line. argparse's status 2 has another meaning in these programs."""


class Parser(argparse.ArgumentParser):
    """Argument parser that exits with `EXIT_USAGE` on errors, as do the parsers of its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


GATEWAY_HELP = "serve the daemon's models over HTTP and gRPC"

_GATEWAY_DESCRIPTION = (
    "Serves the Open Inference Protocol over HTTP and gRPC, also for Triton clients, and forwards requests to the "
    "daemon. SIGTERM or SIGINT stops the gateway after the requests in progress; a second signal stops it at once. "
    "SIGHUP reloads the configuration: access rules take effect at once, all other changes after a restart. Requires "
    "the extra weightd[gateway]. Exit status: 0 success, 64 invalid command line, 73 an address cannot be used, 78 "
    "invalid configuration, or the extra is missing."
)


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the gateway to `parser`."""
    parser.description = _GATEWAY_DESCRIPTION
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a TOML file, see weightd-gateway.toml(5) (default: gateway.toml in CONFIGURATION_DIRECTORY, or in "
        "/etc/weightd)",
    )
    parser.add_argument("--check", action="store_true", help="validate the configuration file and exit")


def to_gateway_arguments(options: argparse.Namespace) -> List[str]:
    """Return the command-line arguments from which a parser with `add_gateway_arguments` parses `options` again."""
    flags = [flag for flag, given in (("--verbose", options.verbose), ("--check", options.check)) if given]
    return [*flags, *(["--", options.config] if options.config else [])]
