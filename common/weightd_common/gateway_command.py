"""What the command line of the gateway takes: declared once, for `weightd gateway` and for what that becomes."""

from __future__ import annotations

import argparse
from typing import List

HELP = "speak HTTP and gRPC for the daemon"

DESCRIPTION = (
    "Speaks HTTP and gRPC with clients of the Open Inference Protocol, Triton's among them, and asks the daemon for "
    "them. Serves until SIGTERM or SIGINT: then it finishes what is under way; a second signal waits for nothing. "
    "SIGHUP reads the configuration again: who may ask holds at once, all else takes a restart. It needs the extra "
    "weightd[gateway]. Exit status: 0 clean, 64 the command line is wrong, 73 an address cannot be had, 78 the "
    "configuration is wrong, or the extra is missing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a TOML file, see weightd-gateway.toml(5) (default: gateway.toml in CONFIGURATION_DIRECTORY, or in "
        "/etc/weightd)",
    )
    parser.add_argument("--check", action="store_true", help="say all that is wrong with the file, and serve nothing")


def to_arguments(options: argparse.Namespace) -> List[str]:
    """Return the command line that was read."""
    flags = [flag for flag, given in (("--verbose", options.verbose), ("--check", options.check)) if given]
    return [*flags, *(["--", options.config] if options.config else [])]
