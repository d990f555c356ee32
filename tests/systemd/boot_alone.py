"""Program that boots a manager and waits, like a test session; test_harness kills it."""

from __future__ import annotations

import signal

from .manager import Manager

if __name__ == "__main__":
    # A shell that starts the tests in the background makes all their child processes ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Manager():
        print("booted", flush=True)
        signal.pause()
