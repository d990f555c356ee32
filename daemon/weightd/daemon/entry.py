"""Where the program `weightd` begins: from here on Ctrl-C ends it without a word, and soon in order."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command; return its exit status."""
    # Python would print where it was in its imports, which take a few tenths of a second. Ignored stays ignored.
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if python_handles:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from weightd.daemon import __main__ as program  # noqa: PLC0415 - what follows must not be missed by the line above

    if python_handles:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return program.main()
