"""Tests of the provider "ge": accepted files, and its selection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendsim import Host, models
from ascendsim.program import Program

from .support import answers, errors_of


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Return the path of the model as the framework exports it."""
    return models.mlp(tmp_path / "exported.mindir", exported=True)


def test_file_fits_only_one_provider(program: Program, path: Path, exported: Path, x: Any) -> None:
    """See ge_graph_executor.cc:1357; single_op_session.cc expects exactly one node of the type Custom."""
    assert errors_of(program, "build(path, provider='ge')") == ["Offline converted MindIR is not supported currently"]
    refused = errors_of(program, "build(exported)", exported=exported)
    assert refused == ["The graph does not have exactly one node of the type Custom."]
    program.do("build(exported, provider='ge')")
    assert answers(program, path, x)


def test_config_file_may_select_provider(program: Program, host: Host, exported: Path, tmp_path: Path) -> None:
    """UpdateProvider (model_impl.cc:436, infer_session.cc:132) applies only if the attribute is empty; it disables
    sharing."""
    file = tmp_path / "config.ini"
    file.write_text("[ascend_context]\nprovider=ge\n", encoding="ascii")
    build = "build(path, pids='1', options={'config_path': file}, provider=provider)"
    assert program.do(build, path=exported, file=str(file), provider="") == ""
    assert program.do("build(path, pids='1', config={'ascend_context': {'provider': 'ge'}})") == ""
    assert errors_of(program, build, provider="acl")[-1].startswith("The graph does not have exactly one")
