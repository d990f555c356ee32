"""Where the program `weightctl` begins: from here on Ctrl-C ends it without a traceback."""

from __future__ import annotations

from weightd.shared.interrupts import silent_while_importing


def main() -> int:
    """Run the command; return its exit status."""
    with silent_while_importing():
        from weightd.ctl import __main__ as program  # noqa: PLC0415 - it imports zmq
    return program.main()
