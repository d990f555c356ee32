"""Interpreters without an engine, and workers that cannot build: the model fails without endless restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from testkit import mindir
from testkit.service import Service
from testkit.waiting import until
from weightd import Client, FailedPrecondition, Unavailable

from .support import (
    ENGINES,
    ONE_ENGINE,
    BareEngine,
    Zoo,
    ask_all,
    cause_of_failure,
    interpreter,
    model_status,
    pairs,
    ready_workers,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2

# A holder, a worker, and the three starts in a row that may fail.
MOST_PROCESSES = 1 + 1 + 3

NO_ONNX_RUNTIME = "No module named 'onnxruntime'; install it from a checkout: pip install './weightd[onnxruntime]'"
NO_MINDSPORE_LITE = "No module named 'mindspore_lite'; install the vendor's wheel of mindspore_lite"


class Bad(NamedTuple):
    """An interpreter, words of the reason, the model's engine, and more keys of the model's table."""

    python: Path
    words: Sequence[str]
    engine: str = "onnxruntime"
    more: Mapping[str, str] = MappingProxyType({})


def executable(path: Path, script: bytes) -> Path:
    path.write_bytes(script)
    path.chmod(0o755)
    return path


def failing_workers(path: Path, which: str) -> Path:
    """Write an interpreter that runs the holder but exits for workers whose names match; it finds the name on stdin."""
    script = (
        f'#!/bin/sh\ncase "$(cat /proc/$$/fd/0)" in {which}) echo no luck >&2; exit 7;; esac\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    return executable(path, script.encode())


CASES = ("without-weightd", "without-engine", "without-mindspore", "missing", "exit-3", "crash", "no-workers")


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bad]:
    made = tmp_path_factory.mktemp("interpreters")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made / "venv")], check=True, timeout=60)
    venv = made / "venv" / "bin" / "python"
    cases = {
        "without-weightd": Bad(
            venv,
            ("exited with status 1", f"install weightd there, from a checkout: {venv} -m pip install ./weightd"),
        ),
        "missing": Bad(made / "nothing", (f"cannot start {made}/nothing: No such file or directory",)),
        "exit-3": Bad(executable(made / "three", b"#!/bin/sh\necho oh no\nexit 3\n"), ("status 3: oh no",)),
        "no-workers": Bad(
            failing_workers(made / "seven", "*.w[0-9]*"),
            (".w", "exited with status 7: ", "no luck"),
            more={"start": "spawn"},
        ),
        "crash": Bad(executable(made / "crash", b"#!/bin/sh\nkill -SEGV $$\n"), ("killed by SIGSEGV",)),
    }
    if mindir.interpreter() is not None:
        own, other = map(interpreter, ENGINES)
        cases["without-engine"] = Bad(other, (f"{other}: {NO_ONNX_RUNTIME}",))
        cases["without-mindspore"] = Bad(own, (f"{own}: {NO_MINDSPORE_LITE}",), "mindspore_lite")
    return cases


@pytest.fixture(scope="module")
def without_pythonpath() -> Iterator[None]:
    """Unset PYTHONPATH; otherwise an interpreter without weightd would find it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module")
def service(engine: str, zoo: Zoo, bad: dict[str, Bad], without_pythonpath: None) -> Iterator[Service]:
    """A daemon with one good model and one model per bad interpreter."""
    path = {each.engine: zoo.path("two_inputs", each.engine) for each in bad.values()}
    tables = {name: {"path": path[each.engine], "python": each.python, **each.more} for name, each in bad.items()}
    with Service({**tables, "good": {"path": zoo.path("two_inputs", engine)}}, verbose=True) as service:
        yield service


@pytest.fixture
def good(engine: str, client: Client, zoo: Zoo, bare: BareEngine) -> Iterator[None]:
    """Check after the test that the good model in the same daemon serves."""
    yield
    ask_all(client, "good", bare.questions(zoo.path("two_inputs", engine), pairs((2, 1))))


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def started(log: str, name: str) -> int:
    """Return the number of processes that the model has had."""
    return len(set(re.findall(rf"\b{name}\.1\.(?:holder|w\d+)\b", log)))


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("case", CASES)
def test_bad_interpreter_fails_only_its_model(case: str, service: Service, client: Client, bad: dict[str, Bad]) -> None:
    if case not in bad:
        pytest.skip(mindir.HOW_TO_GET_IT)
    cause = cause_of_failure(service, case)
    for word in bad[case].words:
        assert word in cause
    # A missing file may appear when a file system is mounted later, so the daemon tries again.
    with pytest.raises(Unavailable if case == "missing" else FailedPrecondition) as caught:
        client.infer(case, {})
    assert re.sub(rf"\b{case}\.\d+\.", f"{case}.N.", str(caught.value)) == re.sub(
        rf"\b{case}\.\d+\.", f"{case}.N.", f"{case} failed: {cause}"
    )
    until(lambda: not model_status(service, case).generations[0].processes, "its processes exit")
    assert started(service.log, case) <= MOST_PROCESSES


def test_restarts_worker_that_failed_to_start_once(engine: str, zoo: Zoo, bare: BareEngine, tmp_path: Path) -> None:
    path = zoo.path("two_inputs", engine)
    python = failing_workers(tmp_path / "python", "*.w2*")
    with Service({"model": {"path": path, "python": python, "workers": WORKERS, "start": "spawn"}}) as service:
        status = service.ready()
        assert [each.name for each in ready_workers(service, "model")] == ["model.1.w1", "model.1.w3"]
        assert status.models[0].generations[0].reason == ""
        with service.client() as client:
            ask_all(client, "model", bare.questions(path, pairs((2, 1))) * 5)
        assert service.stop() == 2  # a child process exited unexpectedly


def test_model_serves_while_some_workers_cannot_build(engine: str, zoo: Zoo, bare: BareEngine, tmp_path: Path) -> None:
    path = zoo.path("two_inputs", engine)
    python = failing_workers(tmp_path / "python", "*.w[2-9]*|*.w1[0-9]*")
    tables = {"model": {"path": path, "python": python, "workers": WORKERS, "start": "spawn"}}
    with Service(tables, verbose=True) as service, service.client() as client:
        questions = bare.questions(path, pairs((2, 1))) * 5
        ask_all(client, "model", questions)
        until(lambda: "no luck" in model_status(service, "model").generations[0].reason, "the status shows the reason")
        until(lambda: started(service.log, "model") >= 1 + 1 + 3, "the daemon has restarted the worker")
        ask_all(client, "model", questions)
        assert [each.name for each in ready_workers(service, "model")] == ["model.1.w1"]
        backing_off = "serving 1/2, backing off"
        until(
            lambda: model_status(service, "model").generations[0].progress == backing_off, "the daemon backs off again"
        )
        # A model that has served does not fail when it loses its last worker; the error of a request gives the reason.
        os.kill(ready_workers(service, "model")[0].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="no luck"):
            client.infer("model", questions[0].inputs, timeout=2)
        assert started(service.log, "model") <= 2 * (MOST_PROCESSES + 1)
