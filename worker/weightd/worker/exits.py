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
SPOILT = 75  # EX_TEMPFAIL: a predict failed and may have spoilt the model; a fresh process is needed

_log = logging.getLogger("weightd.worker")


def end(life: Callable[[], int]) -> NoReturn:
    """Live, and then end this process: with the status that is returned, whatever is raised.

    Native libraries have been seen to crash in their exit handlers; the kernel cleans up better.
    """
    status = FAILED
    try:
        status = life()
    except SystemExit as leaving:
        status = _status(leaving)
    except Exception:  # noqa: BLE001 - what follows has to be done in any case
        _log.exception("the process fails")
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(leaving: SystemExit) -> int:
    """What the interpreter makes of it."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or OK
    print(leaving.code, file=sys.stderr)
    return 1
