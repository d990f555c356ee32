"""Exit statuses of `weightd`, by which a service manager knows whether a restart may help; some from sysexits.h."""

from __future__ import annotations

from collections.abc import Mapping

from weightd_common import commandline

OK = 0
MODEL_FAILED = 1  # the daemon ran, but a model could not be served
PROCESS_DIED = 2  # the daemon was shut down on request, but a child process had exited unexpectedly before
USAGE = commandline.EXIT_USAGE
CANNOT_CREATE = 73  # EX_CANTCREAT: a socket, directory or thread is unavailable, or another daemon has the socket
CONFIG = 78  # EX_CONFIG: the configuration is invalid, so another start would fail, too
INTERRUPTED = 130  # Ctrl-C before the daemon served; shells report this status for a program ended by SIGINT

# Descriptions of the exit statuses for the manual page.
MEANINGS: Mapping[int, str] = {
    OK: "Success; `serve` and `run`: stopped on request.",
    MODEL_FAILED: ("A model could not be served; `check --load`: a model does not load; `doctor`: a check has failed."),
    PROCESS_DIED: "Stopped on request, but a process had exited unexpectedly.",
    USAGE: "Invalid command line.",
    CANNOT_CREATE: "A socket, directory or thread is not available, or another daemon uses the socket.",
    CONFIG: "Invalid configuration: the error names file, key and expected value; or Python is older than 3.10.",
    INTERRUPTED: "Ctrl-C before weightd was ready; after that, Ctrl-C is a normal stop.",
}
