"""`weightd check`: what a start would find wrong, found without loading anything."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightd.daemon.config import canary as canary_config
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.host.ends import explain
from weightd.protocol.version import VERSION
from weightd.shared.modelfile import Model, ModelFileError

_INTERPRETER_TIMEOUT_S = 60.0

# Runs in the model's interpreter, which may be as old as 3.7.
_PROBE = """
import sys
from weightd.protocol.version import VERSION
import weightd.worker.session
from weightd.worker.engines import ENGINES
from weightd.worker.engines.engine import Settings
ENGINES[sys.argv[1]](Settings(1, sys.argv[2], sys.argv[3] == "on"))
print(VERSION)
"""


def problems(models: Mapping[str, ModelConfig]) -> dict[str, list[str]]:
    """Return, by model, what is wrong with its files and its interpreter; each text names the key.

    What a MindIR file takes and gives is known to the library alone, and is not looked at.
    """
    asked: dict[tuple[str, ...], str] = {}
    return {
        name: [f"models.{name}.{problem}" for problem in _model_problems(model, asked)]
        for name, model in models.items()
    }


def _model_problems(model: ModelConfig, asked: dict[tuple[str, ...], str]) -> Iterator[str]:
    path = Path(model.path)
    try:
        with Model(path) as files, files.open(files.files[0]) as file:
            yield from (f"path: {path}: {problem}" for problem in model.spec.refusals(file))
    except ModelFileError as error:
        yield from (f"path: {problem}" for problem in str(error).splitlines())
    except OSError as error:
        yield f"path: {path}: {error.strerror}"
    sample = canary_config.sample(model.canary)
    if sample and not Path(sample).is_file():
        yield f"canary: {sample}: there is no such file"
    yield from (str(error.at(f".{model.engine}")) for error in model.options.file_problems())
    # What models have in common is asked once: an interpreter takes a second.
    question = (model.python, model.engine, model.devices[0], _sharing(model))
    if question not in asked:
        asked[question] = _interpreter_problem(*question)
    if asked[question]:
        yield f"python: {model.python}: {asked[question]}"


def _sharing(model: ModelConfig) -> str:
    return "off" if model.sharing == "off" else "on"


def _interpreter_problem(python: str, engine: str, device: str, sharing: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, engine, device, sharing],
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
