from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from testkit import models
from weightd_daemon.config import check
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.load import Config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_protocol.version import VERSION


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig(str(models.tiny(tmp_path / "tiny.onnx")), "onnxruntime", sys.executable)


def interpreter(tmp_path: Path, script: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def problems(**tables: ModelConfig) -> list[str]:
    found = check.find_problems(tables)
    assert list(found) == list(tables)
    return [problem for each in found.values() for problem in each]


def test_accepts_valid_model_and_interpreter(model: ModelConfig) -> None:
    assert problems(m=model) == []


def test_reports_problems_of_each_model(tmp_path: Path, model: ModelConfig) -> None:
    missing = dataclasses.replace(model, path=str(tmp_path / "missing.onnx"), python="/nonexistent/python")
    assert problems(good=model, bad=missing) == [
        f"models.bad.path: {tmp_path}/missing.onnx: No such file or directory",
        "models.bad.python: /nonexistent/python: cannot be run: No such file or directory",
    ]
    unreadable = dataclasses.replace(model, selftest=str(tmp_path / "missing.npz"))
    [problem] = problems(good=model, bad=unreadable)
    assert problem.startswith(f"models.bad.selftest: {tmp_path}/missing.npz: ")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (f"echo greeting; echo {VERSION}", ""),
        ("echo 0.0.1", f"the interpreter has weightd 0.0.1, the daemon is {VERSION}: install the same version in both"),
        ("true", f"the interpreter has weightd unknown, the daemon is {VERSION}: install the same version in both"),
        ("echo Traceback >&2; echo '  File' >&2; echo 'ImportError: no engine' >&2; exit 1", "ImportError: no engine"),
        ("exit 9", "exited with status 9"),
        ("printf '\\377\\n' >&2; exit 1", "\ufffd"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
    ],
    ids=["greeting", "old", "silent", "traceback", "status", "bytes", "signal"],
)
def test_checks_version_of_interpreter(tmp_path: Path, model: ModelConfig, script: str, problem: str) -> None:
    python = interpreter(tmp_path, script)
    expected = [f"models.m.python: {python}: {problem}"] if problem else []
    assert problems(m=dataclasses.replace(model, python=python)) == expected


def test_describes_tenants_with_resolved_users(model: ModelConfig) -> None:
    tenants = {
        "research": TenantConfig(uids=("alice", "7"), keys=("a.pub",), user_ids=(1001, 7), models=("m", "bert-*")),
        "default": TenantConfig(may=()),
        "site": TenantConfig(may=("infer", "status")),
    }
    config = Config(DaemonConfig(), {"m": model}, tenants=tenants)
    assert list(check.describe_config(config))[1:] == [
        "tenant research: user 1001, 7; key a.pub; may infer; models m, bert-*",
        "tenant default: clients of no other tenant; may do nothing; all models",
        "tenant site: only through a gateway; may infer, status; all models",
    ]


def test_interpreter_without_permission_is_reported(tmp_path: Path, model: ModelConfig) -> None:
    assert problems(m=dataclasses.replace(model, python=str(tmp_path))) == [
        f"models.m.python: {tmp_path}: cannot be run: Permission denied"
    ]


def test_hanging_interpreter_is_reported(tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_INTERPRETER_TIMEOUT_S", 0.1)
    python = interpreter(tmp_path, "exec sleep 1000")
    assert problems(m=dataclasses.replace(model, python=python)) == [
        f"models.m.python: {python}: did not answer within 0.1 s"
    ]


def test_runs_each_distinct_interpreter_check_once(tmp_path: Path, model: ModelConfig) -> None:
    python = interpreter(tmp_path, f"echo asked >> {tmp_path}/asked; echo {VERSION}")
    one = dataclasses.replace(model, python=python)
    assert problems(a=one, b=one, c=dataclasses.replace(one, sharing="off")) == []
    assert (tmp_path / "asked").read_text() == "asked\n" * 2


def test_rejects_onnx_model_with_string_input(tmp_path: Path, model: ModelConfig) -> None:
    text = helper.make_tensor_value_info("x", TensorProto.STRING, ["N"])
    path = models.save(tmp_path / "text.onnx", [], [text], [models.fp32("y", "N")])
    [problem] = problems(m=dataclasses.replace(model, path=str(path)))
    assert problem.startswith(f"models.m.path: {path}: input x: string is not a supported datatype; expected one of ")
