"""`python -m weightd_gateway`: runs the gateway. `weightd gateway` replaces itself with this process."""

from __future__ import annotations

import sys

from weightd_common import process_start
from weightd_gateway import cli

if __name__ == "__main__":
    process_start.reset_signals()
    process_start.serve_as_init()
    sys.exit(cli.main())
