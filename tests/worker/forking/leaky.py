"""Stand-in for an engine's library: the effects of its import must not be visible in forked processes."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import tempfile

import numpy as np

_FILE = os.open(__file__, os.O_RDONLY)
os.dup2(_FILE, 77, inheritable=True)
os.dup2(_FILE, 0)
signal.signal(signal.SIGUSR1, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
os.chdir("/")
os.umask(0)
tempfile.tempdir = "/nowhere"
random.seed(1)
np.random.seed(1)
sys.stdout.write("unfinished")
ctypes.CDLL(None).printf(b"unfinished")


def __getattr__(name: str) -> str:
    """Return, as the version that every worker reads, the state that is visible only inside the process."""
    if name != "__version__":
        raise AttributeError(name)
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    drawn = [round(float(draw()), 6) for draw in (random.random, np.random.random)]
    names = next(tempfile._get_candidate_names())  # type: ignore[attr-defined]
    return json.dumps([*drawn, names, tempfile.gettempdir(), "--role" in sys.argv])
