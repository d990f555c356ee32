"""Exit statuses of a child process, by which the daemon decides how to proceed. Most are numbers of sysexits.h."""

from __future__ import annotations

import logging
import os
import sys
from typing import Callable, NoReturn

OK = 0
CANNOT_BUILD = 65  # EX_DATAERR: the engine rejects the model; another try would fail in the same way
NO_ENGINE = 69  # EX_UNAVAILABLE: the interpreter lacks a library that the engine needs
FAILED = 70  # EX_SOFTWARE: an unexpected error; the traceback is in the log
MODEL_CORRUPTED = 75  # EX_TEMPFAIL: a predict failed and may have corrupted the model; a new process can be started

_log = logging.getLogger("weightd.worker")


def run_and_exit(child_main: Callable[[], int]) -> NoReturn:
    """Run the main function of a child process, and end the process with the status that the function returns.

    After an exception, the process ends with FAILED, or with the status of a SystemExit. The process ends without
    running exit handlers, because the exit handlers of some native libraries crash. The kernel frees all resources.
    """
    status = FAILED
    try:
        status = child_main()
    except SystemExit as leaving:
        status = _exit_status(leaving)
    except Exception:  # noqa: BLE001 - the process has to flush its output and exit in any case
        _log.exception("the process failed")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_status(exit_request: SystemExit) -> int:
    """Return the exit status for a SystemExit. If it has a text instead of a status, print the text to stderr."""
    if exit_request.code is None or isinstance(exit_request.code, int):
        return exit_request.code or OK
    print(exit_request.code, file=sys.stderr)
    return 1
