"""Exit statuses of a child, on which the daemon acts. They follow sysexits.h where a number fits."""

from __future__ import annotations

import logging
import os
import sys
from typing import Callable, NoReturn

OK = 0
CANNOT_BUILD = 65  # EX_DATAERR: the engine rejects the model; another try would end the same
NO_ENGINE = 69  # EX_UNAVAILABLE: the interpreter lacks a library that the engine needs
FAILED = 70  # EX_SOFTWARE: an unexpected error; the traceback is in the log
MODEL_CORRUPTED = 75  # EX_TEMPFAIL: a predict failed and may have corrupted the model; a fresh process is needed

_log = logging.getLogger("weightd.worker")


def run_and_exit(child_main: Callable[[], int]) -> NoReturn:
    """Run the main function of a child, and end the process with the status that the function returns.

    An exception ends the process, too, with FAILED, or the status of a SystemExit. No exit handlers run, because
    native libraries have been seen to crash in theirs; the kernel frees everything.
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
    """Return the status that the interpreter would exit with, and print the text of the request, if it has one."""
    if exit_request.code is None or isinstance(exit_request.code, int):
        return exit_request.code or OK
    print(exit_request.code, file=sys.stderr)
    return 1
