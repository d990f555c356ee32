"""The provider "ge": which files it takes, and who chooses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendsim import Host, models
from ascendsim.program import Program

from .support import answers, errors_of


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The model of `path`, as the framework exports it."""
    return models.mlp(tmp_path / "exported.mindir", exported=True)


def test_a_file_is_for_one_of_the_two_providers(program: Program, path: Path, exported: Path, x: Any) -> None:
    """ge_graph_executor.cc:1357; and single_op_session.cc wants exactly one node of the type Custom."""
    assert errors_of(program, "build(path, provider='ge')") == ["Offline converted MindIR is not supported currently"]
    refused = errors_of(program, "build(exported)", exported=exported)
    assert refused == ["The graph does not have exactly one node of the type Custom."]
    program.do("build(exported, provider='ge')")
    assert answers(program, path, x)


def test_a_config_file_can_choose_the_provider_and_thereby_switch_sharing_off(
    program: Program, host: Host, exported: Path, tmp_path: Path
) -> None:
    """UpdateProvider (model_impl.cc:436, infer_session.cc:132): only where the attribute is empty."""
    file = tmp_path / "config.ini"
    file.write_text("[ascend_context]\nprovider=ge\n", encoding="ascii")
    build = "build(path, pids='1', options={'config_path': file}, provider=provider)"
    assert program.do(build, path=exported, file=str(file), provider="") == ""
    assert program.do("build(path, pids='1', config={'ascend_context': {'provider': 'ge'}})") == ""
    assert errors_of(program, build, provider="acl")[-1].startswith("The graph does not have exactly one")
