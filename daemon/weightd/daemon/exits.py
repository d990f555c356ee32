"""Exit statuses of the daemon, as in sysexits.h: a service manager can tell what is worth another start."""

from __future__ import annotations

OK = 0
MODEL_FAILED = 1  # it ran, but a model could not be served
PROCESS_DIED = 2  # it served, and stopped when it was told to; but a process ended before that was not asked to
CANNOT_CREATE = 73  # EX_CANTCREAT: a socket or a directory cannot be had, or another daemon has it
CONFIG = 78  # EX_CONFIG: the configuration is wrong; starting again would end the same
