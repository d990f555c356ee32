"""Where the program `weightctl` begins: from here on Ctrl-C ends it without a traceback."""

from __future__ import annotations

import sys

from weightd_common import signals
from weightd_common.gc_control import gc_disabled
from weightd_common.sigint import silent_while_importing


def main() -> int:
    """Run the command; return its exit status."""
    with silent_while_importing(), gc_disabled():
        signals.reset()
        from weightd_common.init import serve_as_init  # noqa: PLC0415 - it imports ctypes

        serve_as_init()
        from weightctl import cli  # noqa: PLC0415 - it imports zmq
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
