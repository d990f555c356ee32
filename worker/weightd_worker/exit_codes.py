"""Exit statuses of a child, which the daemon acts on, and its end. Numbers as in sysexits.h where one fits."""

from __future__ import annotations

import logging
import os
import sys
from typing import Callable, NoReturn

OK = 0
CANNOT_BUILD = 65  # EX_DATAERR: the engine refuses the model; another try would end the same
NO_ENGINE = 69  # EX_UNAVAILABLE: the interpreter has not what the engine needs
FAILED = 70  # EX_SOFTWARE: an error that nobody foresaw; the traceback is in the log
MODEL_CORRUPTED = 75  # EX_TEMPFAIL: a predict failed and may have spoilt the model; a fresh process is needed

_log = logging.getLogger("weightd.worker")


def run_and_exit(child_main: Callable[[], int]) -> NoReturn:
    """Live, and then end this process: with the status that is returned, whatever is raised.

    Native libraries have been seen to crash in their exit handlers; the kernel cleans up better.
    """
    status = FAILED
    try:
        status = child_main()
    except SystemExit as leaving:
        status = _exit_status(leaving)
    except Exception:  # noqa: BLE001 - what follows has to be done in any case
        _log.exception("the process fails")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _exit_status(exit_request: SystemExit) -> int:
    """What the interpreter makes of it."""
    if exit_request.code is None or isinstance(exit_request.code, int):
        return exit_request.code or OK
    print(exit_request.code, file=sys.stderr)
    return 1
