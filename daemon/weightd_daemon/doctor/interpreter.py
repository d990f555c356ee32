"""Report of a model's interpreter on its packages and cards. It runs in a child process, which may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightd_daemon.platform.exit_cause import describe_status

_LOG_TAIL_LINES = 4

# Maximum seconds of a report. Imports from a disk without cache and the start of the driver may take long.
_MAX_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class InterpreterReport:
    """The output of `python -m weightd_worker.report`.

    Attributes:
        steps: by the name of the step, the values that each completed step has reported; a failed step has only
            `error`.
        unfinished_step: the step during which the process ended; "" if no step was interrupted.
        exit_description: how the process ended, in words; "" if it succeeded.
        log_tail: the last lines in the log of the process and its libraries.
    """

    steps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    unfinished_step: str = ""
    exit_description: str = ""
    log_tail: str = ""

    def value(self, step: str, name: str) -> Any:
        """Return a value of a step; None if the process did not complete the step."""
        return self.steps.get(step, {}).get(name)

    def error(self, step: str) -> str:
        """Return the reason why a step has no values; "" if the step has values."""
        if step in self.steps:
            return str(self.steps[step].get("error", ""))
        if step == self.unfinished_step:
            return f"process {self.exit_description}" + (f"; its log ends: {self.log_tail}" if self.log_tail else "")
        return (
            f"not reached: process {self.exit_description} in the step {self.unfinished_step}"
            if self.unfinished_step
            else "not reached"
        )


def run_report(python: str, device: int, limit_s: float, environment: Mapping[str, str]) -> InterpreterReport:
    """Run the interpreter and return its report, which is incomplete if the process took longer than `limit_s`."""
    argv = [python, "-m", "weightd_worker.report", "--device", str(device), "--parent", str(os.getpid())]
    timeout_s = min(limit_s, _MAX_TIMEOUT_S)
    with tempfile.TemporaryFile() as log:
        exit_description = ""
        try:
            # On a timeout, `run` kills the process and waits for it.
            result = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=timeout_s,
                check=False,
                env=environment,
            )
            output: bytes = result.stdout
            if result.returncode != 0:
                exit_description = describe_status(result.returncode)
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            exit_description = f"killed: no answer within {timeout_s:g} s"
        except OSError as error:
            return InterpreterReport(exit_description=f"cannot be run: {error.strerror}")
        log.seek(0)
        return parse_report(output.decode("utf-8", "replace"), exit_description, log.read().decode("utf-8", "replace"))


def parse_report(output: str, exit_description: str, log: str) -> InterpreterReport:
    """Return the report in the output of a process; an incomplete line is ignored."""
    steps: dict[str, Mapping[str, Any]] = {}
    current_step = ""
    for line in output.splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if "begin" in values:
            current_step = values["begin"]
        elif "step" in values:
            steps[values.pop("step")] = values
            current_step = ""
    lines = [" ".join(line.split()) for line in log.splitlines() if line.strip()]
    return InterpreterReport(
        steps, current_step, exit_description or ("ended" if current_step else ""), " | ".join(lines[-_LOG_TAIL_LINES:])
    )
