"""Boot a manager and wait: what a session of tests does that is about to be killed."""

from __future__ import annotations

import signal

from .manager import Manager

if __name__ == "__main__":
    # A shell that starts the tests in the background makes everything below it ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Manager():
        print("booted", flush=True)
        signal.pause()
