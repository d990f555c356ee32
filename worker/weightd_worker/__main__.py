"""Entry point of a spawned child process: the daemon runs ``python -m weightd_worker``."""

from __future__ import annotations

import signal
import sys

from weightd_common import process_start
from weightd_common.process_start import die_with_named_parent

if __name__ == "__main__":
    # Ignore SIGINT: on Ctrl-C, the daemon stops its children in the right order.
    process_start.reset_signals(signal.SIGINT)
    die_with_named_parent(sys.argv)

from weightd_worker import arguments, exit_codes, main_loop


def main() -> int:
    """Run one child process until the daemon stops it, and return its exit status."""
    return main_loop.run(arguments.parse(arguments.read_arguments()), main_loop.prepare_process())


if __name__ == "__main__":
    exit_codes.run_and_exit(main)
