"""A daemon that counts the calls of its main thread: `python -m testkit.counting_daemon RESULT serve CONFIG`.

At its end it writes RESULT: the numbers of calls of Python functions and of C functions, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from weightd_daemon.cli import main


def run(result: Path, arguments: list[str]) -> int:
    """Run the daemon, and write the counts; return the exit status."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        return main(arguments)
    finally:
        sys.setprofile(None)
        result.write_text(json.dumps(counts), "utf-8")


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
