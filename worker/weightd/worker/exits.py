"""Exit statuses of a child, which the daemon acts on. Numbers as in sysexits.h where one fits."""

from __future__ import annotations

OK = 0
CANNOT_BUILD = 65  # EX_DATAERR: the engine refuses the model; another try would end the same
NO_ENGINE = 69  # EX_UNAVAILABLE: the interpreter has not what the engine needs
FAILED = 70  # EX_SOFTWARE: an error that nobody foresaw; the traceback is in the log
SPOILT = 75  # EX_TEMPFAIL: a predict failed and may have spoilt the model; a fresh process is needed
