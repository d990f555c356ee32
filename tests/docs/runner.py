"""Runs programs from a JSON file of names and texts; writes another one of names and the lines that each prints."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# What separates the cells of one program.
CELL = "# %%\n"


async def run_cells(cells: Sequence[str], names: dict[str, Any]) -> None:
    """What a notebook does: each cell has the names of those before, and awaits in the same loop."""
    for cell in cells:
        code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaited = eval(code, names)
        if inspect.iscoroutine(awaited):
            await awaited


def printed(program: str) -> list[str]:
    """Run it; return what it prints, and how it fails."""
    into = io.StringIO()
    # What it defines has to be found in `__main__` by the processes that it starts.
    names = sys.modules["__main__"].__dict__
    before = {**names}
    try:
        with contextlib.redirect_stdout(into):
            if CELL in program:
                asyncio.run(run_cells(program.split(CELL), names))
            else:
                exec(compile(program, "program", "exec"), names)  # as an interpreter would
    except Exception:  # noqa: BLE001 - the test tells of it
        into.write(traceback.format_exc())
    names.clear()
    names.update(before)
    return into.getvalue().splitlines()


if __name__ == "__main__":
    programs: dict[str, str] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    results = {name: printed(program) for name, program in programs.items()}
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
