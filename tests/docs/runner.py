"""Runs programs from a JSON file of names and sources; writes the lines that each prints to another file."""

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

# Separates the cells of one program.
CELL = "# %%\n"


async def run_cells(cells: Sequence[str], names: dict[str, Any]) -> None:
    """Run cells like a notebook: they share names and event loop."""
    for cell in cells:
        code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaited = eval(code, names)
        if inspect.iscoroutine(awaited):
            await awaited


def printed(program: str) -> list[str]:
    """Run a program; return the lines that it prints, including the traceback of an error."""
    into = io.StringIO()
    # Processes that the program starts must find its definitions in `__main__`.
    names = sys.modules["__main__"].__dict__
    before = {**names}
    try:
        with contextlib.redirect_stdout(into):
            if CELL in program:
                asyncio.run(run_cells(program.split(CELL), names))
            else:
                exec(compile(program, "program", "exec"), names)  # as an interpreter would
    except Exception:  # noqa: BLE001 - the test compares the traceback
        into.write(traceback.format_exc())
    names.clear()
    names.update(before)
    return into.getvalue().splitlines()


if __name__ == "__main__":
    programs: dict[str, str] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    results = {name: printed(program) for name, program in programs.items()}
    Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
