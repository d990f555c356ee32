"""`python -m weightd_gateway`: the process that `weightd gateway` becomes."""

from __future__ import annotations

import sys

from weightd_common import signals
from weightd_common.init import serve_as_init
from weightd_gateway import cli

if __name__ == "__main__":
    signals.reset()
    serve_as_init()
    sys.exit(cli.main())
