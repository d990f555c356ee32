"""Helpers for the tests of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np

from ascendsim import Host, driver_state, models
from ascendsim.program import Program

Start = Callable[..., Program]

ATTACH = "build(path, handle=handle)"


def errors_of(program: Program, code: str = "build(path)", **values: Any) -> List[str]:
    """Return the log lines of a build that fails without a reason."""
    before = len(program.errors())
    error = program.refusal(code, **values)
    assert (error.kind, error.text) == ("RuntimeError", "build_from_file failed! Error is Common error code.")
    return program.errors()[before:]


def assert_refused(
    program: Program, handle: str, cause: str = "please Keep the main process running", **v: Any
) -> None:
    """Check that the attach fails and that the log ends with a wrong cause and begins with the right one."""
    first, *_, last = errors_of(program, ATTACH, handle=handle, **v)
    assert cause in first
    assert last == "Pre init model resource failed."


def share(start: Start, workers: int = 1, attached: int = 1) -> Tuple[Program, List[Program], str]:
    """Return a holder, the workers that it lists (the first of them attached), and the handle."""
    holder, others = start(), [start() for _ in range(workers)]
    handle: str = holder.do("build(path, pids=pids)", pids=",".join(str(other.do("pid()")) for other in others))
    for other in others[:attached]:
        assert other.do(ATTACH, handle=handle) == ""
    return holder, others, handle


def answers(program: Program, path: Path, x: Any, code: str = "predict(x)") -> bool:
    """Return whether the code returns this model's answer to x."""
    return np.array_equal(program.do(code), models.answer(path, x))


def kinds(host: Host, device: int = 0) -> List[str]:
    """Return the kinds of allocations on a card, without contexts and workspaces."""
    others = (driver_state.CONTEXT, driver_state.WORKSPACE)
    return [each.kind for each in host.card_state(device).allocations if each.kind not in others]
