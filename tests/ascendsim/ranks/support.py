"""What the tests of worlds say of them."""

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
"""How long an impatient rank waits for the others at its first predict, and later in a predict."""
EXEC_S = 68 * _SECOND


def impatient(host: Host) -> None:
    """Let time-outs come soon. Until then they are far away, however busy the machine is."""
    host.switch(hccl_second=_SECOND)


def predict(programs: List[Program], *inputs: Any) -> List[Any]:
    """Let all predict at once, each its own input or all the only one; what each gets, or its error's type."""
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
    """A world that has answered once."""
    programs = world(cut, **more)
    assert_right(programs, cut, x)
    return programs
