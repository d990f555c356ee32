"""Helpers for the tests of rank groups."""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np

from ascendsim import Host
from ascendsim.program import Program, ProgramError
from ascendsim.ranks import Slices

World = Callable[..., List[Program]]

EXEC = {"HCCL_EXEC_TIMEOUT": "68"}

_SECOND = 0.003
CONNECT_S = 140 * _SECOND
"""How long a rank with short time-outs waits for the others in its first predict, and in later ones."""
EXEC_S = 68 * _SECOND


def shorten_timeouts(host: Host) -> None:
    """Shorten the time-outs, which otherwise do not expire even on a busy machine."""
    host.switch(hccl_second=_SECOND)


def predict(programs: List[Program], *inputs: Any) -> List[Any]:
    """Run predict in all programs at once, each with its input or with a common one; return answers or error types."""
    for index, program in enumerate(programs):
        program.begin("predict(x)", x=inputs[index % len(inputs)])
    answers: List[Any] = []
    for program in programs:
        try:
            answers.append(program.result())
        except ProgramError as error:
            answers.append(error.text)
    return answers


def assert_right(programs: List[Program], cut: Slices, x: Any) -> None:
    assert all(map(np.array_equal, predict(programs, x), cut.answers(x)))


def connected(world: World, cut: Slices, x: Any, **more: Any) -> List[Program]:
    """Start a rank group and run one predict."""
    programs = world(cut, **more)
    assert_right(programs, cut, x)
    return programs
