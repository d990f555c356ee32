"""A program that counts the calls of its main thread: `python -m testkit.counting_process RESULT MODULE ARGUMENTS`.

MODULE is the module of the program's command line, such as `weightd_daemon.cli`. At its end the program writes RESULT:
the numbers of calls of Python functions and of C functions, as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, cast


def run(result: Path, module: str, arguments: list[str]) -> int:
    """Run the program, and write the counts; return the exit status."""
    main = import_module(module).main
    counts = {"call": 0, "c_call": 0}

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        return cast(int, main(arguments))
    finally:
        sys.setprofile(None)
        result.write_text(json.dumps(counts), "utf-8")


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
