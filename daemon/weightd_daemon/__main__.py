"""Entry point of the program `weightd`: prepares the process, then runs the command line.

While the modules are imported, Ctrl-C ends the process without a traceback. This file must run on Python 3.7, so that a
user who starts it with the old interpreter of an engine gets a readable error.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Sequence

from weightd_common import process_start
from weightd_daemon import exit_codes


def main() -> int:
    """Run the command line of this process; return the exit status."""
    if sys.version_info < (3, 10):
        has = ".".join(map(str, sys.version_info[:2]))
        print(
            f"weightd: the daemon needs Python 3.10 or later, and {sys.executable} is {has}: install weightd in an "
            "environment with one, and name this interpreter in the key `python` of its models",
            file=sys.stderr,
        )
        return exit_codes.CONFIG
    with process_start.silent_while_importing():
        process_start.reset_signals()
        # All processes of the daemon inherit this setting.
        process_start.disable_core_dumps()
        process_start.serve_as_init()
        zygote_process = None
        if _is_serve_command(sys.argv[1:]):
            from weightd_daemon.zmq_proxy import zygote  # noqa: PLC0415 - the zygote is forked with few modules loaded

            # Ignore a failed fork: the daemon starts a zygote later if it needs ZeroMQ proxies, and logs any error.
            with contextlib.suppress(OSError):
                zygote_process = zygote.fork()
        with process_start.gc_disabled():
            from weightd_daemon import cli  # noqa: PLC0415 - this import takes a few tenths of a second
    return cli.main(zygote=zygote_process)


def _is_serve_command(arguments: Sequence[str]) -> bool:
    """Return whether the command starts a daemon, for whose ZeroMQ proxies a zygote has to be forked first."""
    name = next((each for each in arguments if not each.startswith("-")), "")
    return name in ("serve", "run") and not {"-h", "--help"}.intersection(arguments)


if __name__ == "__main__":
    sys.exit(main())
