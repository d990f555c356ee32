"""`weightd check`: what a start would find wrong, found without starting anything."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from weightd.daemon.config import Config, ModelConfig
from weightd.daemon.engine_options import check_files
from weightd.daemon.processes import explain
from weightd.protocol.modelfile import ModelFileError, model_files
from weightd.protocol.version import VERSION

_INTERPRETER_TIMEOUT_S = 60.0

# Runs in the model's interpreter, which may be as old as 3.7.
_PROBE = """
import sys
from weightd.protocol.version import VERSION
import weightd.worker.session
from weightd.worker.engines import ENGINES
from weightd.worker.engines.base import Settings
ENGINES[sys.argv[1]](Settings(1, sys.argv[2], sys.argv[3] == "on"))
print(VERSION)
"""


def problems(config: Config) -> list[str]:
    """Return what is wrong with the models and their interpreters; each text names the key."""
    return [f"models.{name}.{problem}" for name, model in config.models.items() for problem in _model_problems(model)]


def _model_problems(model: ModelConfig) -> Iterator[str]:
    try:
        model_files(Path(model.path))
    except ModelFileError as error:
        yield f"path: {error}"
    yield from map(str, check_files(model.mindspore_lite))
    problem = _interpreter_problem(model)
    if problem:
        yield f"python: {model.python}: {problem}"


def _sharing(model: ModelConfig) -> str:
    return "off" if model.sharing == "off" else "on"


def _interpreter_problem(model: ModelConfig) -> str:
    try:
        done = subprocess.run(
            [model.python, "-c", _PROBE, model.engine, model.devices[0], _sharing(model)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"did not answer within {_INTERPRETER_TIMEOUT_S:g} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [explain(done.returncode)])[-1]
    # An engine may greet on stdout when it is imported: ours is the last word.
    theirs = (done.stdout.split() or ["unknown"])[-1]
    return "" if theirs == VERSION else f"it has weightd {theirs}, the daemon is {VERSION}"
