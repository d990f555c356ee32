"""Exit statuses of the daemon, following sysexits.h, so that a service manager knows which ones justify a restart."""

from __future__ import annotations

from collections.abc import Mapping

from weightd_common import commandline

OK = 0
MODEL_FAILED = 1  # the daemon ran, but a model could not be served
PROCESS_DIED = 2  # the daemon served and stopped on request, but a child process had ended unexpectedly
USAGE = commandline.EXIT_USAGE
CANNOT_CREATE = 73  # EX_CANTCREAT: a socket, directory or thread is unavailable, or another daemon has the socket
CONFIG = 78  # EX_CONFIG: the configuration is invalid; another start would fail in the same way
INTERRUPTED = 130  # Ctrl-C before the daemon served; the status that a shell reports for SIGINT

# Texts for the manual page.
MEANINGS: Mapping[int, str] = {
    OK: "It did what it was asked to, and stopped on request.",
    MODEL_FAILED: (
        "It ran, but a model could not be served; `check --load`: one does not load; `doctor`: a check has failed."
    ),
    PROCESS_DIED: "It served and stopped on request, but a process had ended unexpectedly.",
    USAGE: "The command line is wrong.",
    CANNOT_CREATE: "A socket, a directory or a thread cannot be had, or another daemon has the socket.",
    CONFIG: "The configuration is wrong: the text names file, key and what was expected; or Python is older than 3.10.",
    INTERRUPTED: "Ctrl-C before it served; later that is a stop in order.",
}
