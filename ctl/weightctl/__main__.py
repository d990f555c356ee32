"""Entry point of the program `weightctl`. Prepares the process so that Ctrl-C never prints a traceback."""

from __future__ import annotations

import sys

from weightd_common import process_start


def main() -> int:
    """Run the command and return its exit status."""
    with process_start.silent_while_importing(), process_start.gc_disabled():
        process_start.reset_signals()
        process_start.serve_as_init()
        from weightctl import cli  # noqa: PLC0415 - the import takes long because of zmq
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
