"""Models for the engine of this interpreter, and a log that native code writes to."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, ContextManager, Generator

import pytest

from testkit import mindir
from weightd.worker.engines import ENGINES
from weightd.worker.engines.base import Engine, Settings

ENGINE = "mindspore_lite" if importlib.util.find_spec("mindspore_lite") else "onnxruntime"
"""What this interpreter has: .venv has one, .venv-mslite the other."""


@pytest.fixture(scope="session")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the ONNX models. Where there is no onnx, .venv writes them."""
    directory = tmp_path_factory.mktemp("onnx")
    python = sys.executable if importlib.util.find_spec("onnx") else mindir.REPOSITORY / ".venv" / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": str(mindir.REPOSITORY / "tests" / "support")}
    subprocess.run([str(python), str(Path(__file__).with_name("zoo.py")), str(directory)], check=True, env=environment)
    return directory


@pytest.fixture(scope="session")
def model(onnx: Path) -> Callable[[str], Path]:
    """Give the path of a model of the zoo, in the format of this interpreter's engine."""

    def path(name: str) -> Path:
        source = onnx / f"{name}.onnx"
        if ENGINE == "onnxruntime":
            return source
        converted = source.with_suffix(".mindir")
        return converted if converted.exists() else mindir.convert(source, converted, Path(sys.executable))

    return path


@pytest.fixture
def engine() -> Engine:
    """This interpreter's engine, not built yet."""
    return ENGINES[ENGINE](Settings(1, "cpu"))


@pytest.fixture
def built(engine: Engine, model: Callable[[str], Path]) -> Callable[[str], Engine]:
    """Give this interpreter's engine with a model of the zoo."""

    def build(name: str) -> Engine:
        engine.build(str(model(name)))
        return engine

    return build


@pytest.fixture
def native_log(tmp_path: Path) -> Callable[[], ContextManager[Path]]:
    """Let file descriptor 2 be a file for a block, as the daemon sets it up for a child.

    Not for a whole test: pytest itself redirects the descriptor between a fixture and its test.
    """

    @contextlib.contextmanager
    def redirect() -> Generator[Path, None, None]:
        log = tmp_path / "stderr.log"
        saved = os.dup(2)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(saved, 2)
            os.close(saved)

    return redirect
