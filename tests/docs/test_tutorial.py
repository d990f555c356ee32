"""docs/tutorial.md: its blocks run in order, with the results that the page shows."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from testkit import mindir, models
from weightd import Client

from .page import blocks, broken_links, daemon_environment, long_lines, output, promised_output, run, sections, served

pytestmark = pytest.mark.e2e

PAGE = "tutorial.md"
SECTIONS = sections(PAGE)


def code(section: str, *languages: str) -> list[str]:
    """Return the blocks of a section; they must have these languages."""
    found = blocks(SECTIONS[section])
    assert tuple(block.language for block in found) == languages
    return [block.code for block in found]


@pytest.fixture
def env(directory: Path) -> dict[str, str]:
    return daemon_environment(directory, directory / "weightd.sock")


def shell(command: str, directory: Path, env: dict[str, str]) -> str:
    return "\n".join(output(["bash", "-ec", command], directory, env))


# --- a model like the one that PyTorch exports ----------------------------------------------------------------------


def write_model(path: Path, more: float = 0.0) -> None:
    """Write a model like that on the page, with other values."""
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((64, 32), np.float32), rng.standard_normal((32, 10), np.float32)
    weights = {"first": first, "second": second, "bias": np.full(10, more, np.float32)}
    nodes = [
        onnx.helper.make_node("MatMul", ["image", "first"], ["m"]),
        onnx.helper.make_node("Relu", ["m"], ["r"]),
        onnx.helper.make_node("MatMul", ["r", "second"], ["s"]),
        onnx.helper.make_node("Add", ["s", "bias"], ["scores"]),
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    models.save(path, nodes, [models.fp32("image", "n", 64)], [models.fp32("scores", "n", 10)], tensors)


@pytest.fixture
def exported(directory: Path) -> None:
    write_model(directory / "digits.onnx")
    write_model(directory / "digits-v2.onnx", more=1.0)
    images = np.random.default_rng(1).random((5, 64), np.float32)
    np.savez(directory / "sample.npz", image=images)
    np.save(directory / "scores.npy", answer(directory / "digits.onnx", images))


def answer(path: Path, images: Any) -> Any:
    [scores] = onnxruntime.InferenceSession(str(path)).run(["scores"], {"image": images})
    return scores


def test_exports_models_of_other_sections(directory: Path, env: dict[str, str]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: the export of docs/tutorial.md is not tested")
    [export] = code("Export", "python")
    again, _ = (block.code for block in blocks(SECTIONS["Exchange it"]) if block.language == "python")
    # torch may print warnings.
    output([sys.executable, "-c", export + again], directory, env)
    with np.load(directory / "sample.npz") as sample:
        images = sample["image"]
    expected = np.load(directory / "scores.npy")
    for name, more in (("digits.onnx", 0.0), ("digits-v2.onnx", 1.0)):
        scores = answer(directory / name, images)
        assert scores.shape == (5, 10)
        assert np.allclose(scores, expected + more, rtol=1e-4, atol=1e-5)
    # The export writes no external data files.
    assert sorted(each.name for each in directory.glob("digits*")) == ["digits-v2.onnx", "digits.onnx"]


def assert_answers(directory: Path, env: dict[str, str]) -> None:
    """Check that the first model is served."""
    with Client(env["WEIGHTD_SOCKET"]) as client, np.load(directory / "sample.npz") as sample:
        scores = client.infer("digits", sample["image"])["scores"]
    assert np.allclose(scores, np.load(directory / "scores.npy"), rtol=1e-4, atol=1e-5)


# --- serving --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exported")
def test_serves_calls_updates_and_rolls_back(directory: Path, env: dict[str, str]) -> None:
    serve, status = code("Look at it", "sh", "sh")
    [call] = code("Call it", "python")
    _, update, after, rollback = code("Exchange it", "python", "sh", "python", "sh")
    with served(serve, directory, env):
        assert run({"call": call}, directory, env) == {"call": promised_output(call)}
        assert "digits" in shell(status, directory, env)
        assert "digits-v2.onnx" in shell(update, directory, env)
        assert run({"after": after}, directory, env) == {"after": promised_output(after)}
        shell(rollback, directory, env)
        assert_answers(directory, env)
    assert len(promised_output(call)) == 3
    assert len(promised_output(after)) == 1


@pytest.mark.usefixtures("exported")
def test_configuration_loads(directory: Path, env: dict[str, str]) -> None:
    config, check = code("Serve it for good", "toml", "sh")
    (directory / "weightd.toml").write_text(config, encoding="utf-8")
    shell(check, directory, env)


@pytest.mark.usefixtures("exported")
def test_converts_and_serves_mindir(directory: Path, env: dict[str, str]) -> None:
    python = mindir.interpreter()
    if python is None:
        if os.environ.get("CI") == "true":
            pytest.fail(mindir.HOW_TO_GET_IT)
        pytest.skip(mindir.HOW_TO_GET_IT)
    convert, serve = code("With MindSpore", "python", "sh")
    output([str(python), "-c", convert], directory, {})
    # The Converter makes the file read-only, and readable by its owner only.
    assert (directory / "digits.mindir").is_file()
    with served(serve, directory, {**env, "MSLITE_PYTHON": str(python)}):
        assert_answers(directory, env)


# --- the page -------------------------------------------------------------------------------------------------------


def test_all_blocks_of_tutorial_are_tested() -> None:
    tried = {"Export", "Look at it", "Call it", "Serve it for good", "Exchange it", "With MindSpore"}
    assert {name for name, text in SECTIONS.items() if blocks(text)} == tried


def test_links_and_line_lengths() -> None:
    assert broken_links(PAGE) == []
    assert long_lines(PAGE) == []
