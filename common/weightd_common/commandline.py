"""Argument parser of weightd's programs, and the command line of the gateway.

The gateway's arguments are declared here because both `weightd gateway` and the process that it becomes parse them.
"""

from __future__ import annotations

import argparse
import sys
from typing import List, NoReturn

EXIT_USAGE = 64
"""EX_USAGE of sysexits.h: the command line is wrong. argparse's own 2 means something else in these programs."""


class Parser(argparse.ArgumentParser):
    """Argument parser that exits with `EXIT_USAGE` on errors, as do the parsers of its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


GATEWAY_HELP = "speak HTTP and gRPC for the daemon"

_GATEWAY_DESCRIPTION = (
    "Speaks HTTP and gRPC with clients of the Open Inference Protocol, Triton's among them, and asks the daemon for "
    "them. Serves until SIGTERM or SIGINT: then it finishes what is under way; a second signal waits for nothing. "
    "SIGHUP reads the configuration again: who may ask holds at once, all else takes a restart. It needs the extra "
    "weightd[gateway]. Exit status: 0 clean, 64 the command line is wrong, 73 an address cannot be had, 78 the "
    "configuration is wrong, or the extra is missing."
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
    parser.add_argument("--check", action="store_true", help="say all that is wrong with the file, and serve nothing")


def to_gateway_arguments(options: argparse.Namespace) -> List[str]:
    """Return the command line from which `add_gateway_arguments` parsed these options."""
    flags = [flag for flag, given in (("--verbose", options.verbose), ("--check", options.check)) if given]
    return [*flags, *(["--", options.config] if options.config else [])]
