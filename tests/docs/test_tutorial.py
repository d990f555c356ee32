"""docs/tutorial.md: its blocks run in their order, and do what the page says."""

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

from .page import blocks, broken_links, daemon_environment, long_lines, output, run, said, sections, served

pytestmark = pytest.mark.e2e

PAGE = "tutorial.md"
SECTIONS = sections(PAGE)


def code(section: str, *languages: str) -> list[str]:
    """The blocks of a section, which are of these languages."""
    found = blocks(SECTIONS[section])
    assert tuple(block.language for block in found) == languages
    return [block.code for block in found]


@pytest.fixture
def env(directory: Path) -> dict[str, str]:
    """Return the environment of both terminals."""
    return daemon_environment(directory, directory / "weightd.sock")


def shell(command: str, directory: Path, env: dict[str, str]) -> str:
    return "\n".join(output(["bash", "-ec", command], directory, env))


# --- a model as PyTorch makes it ------------------------------------------------------------------------------------


def write_model(path: Path, more: float = 0.0) -> None:
    """The page's, with other values."""
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


def test_the_export_is_what_the_rest_of_the_page_takes(directory: Path, env: dict[str, str]) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no PyTorch: the export of docs/tutorial.md is not tried")
    [export] = code("Export", "python")
    again, _ = (block.code for block in blocks(SECTIONS["Exchange it"]) if block.language == "python")
    # torch warns of itself.
    output([sys.executable, "-c", export + again], directory, env)
    with np.load(directory / "sample.npz") as sample:
        images = sample["image"]
    expected = np.load(directory / "scores.npy")
    for name, more in (("digits.onnx", 0.0), ("digits-v2.onnx", 1.0)):
        scores = answer(directory / name, images)
        assert scores.shape == (5, 10)
        assert np.allclose(scores, expected + more, rtol=1e-4, atol=1e-5)
    # Nothing lies beside them.
    assert sorted(each.name for each in directory.glob("digits*")) == ["digits-v2.onnx", "digits.onnx"]


def assert_answers(directory: Path, env: dict[str, str]) -> None:
    """What is served is the first model."""
    with Client(env["WEIGHTD_SOCKET"]) as client, np.load(directory / "sample.npz") as sample:
        scores = client.infer("digits", sample["image"])["scores"]
    assert np.allclose(scores, np.load(directory / "scores.npy"), rtol=1e-4, atol=1e-5)


# --- served ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exported")
def test_it_is_served_called_exchanged_and_taken_back(directory: Path, env: dict[str, str]) -> None:
    serve, status = code("Look at it", "sh", "sh")
    [call] = code("Call it", "python")
    _, update, after, rollback = code("Exchange it", "python", "sh", "python", "sh")
    with served(serve, directory, env):
        assert run({"call": call}, directory, env) == {"call": said(call)}
        assert "digits" in shell(status, directory, env)
        assert "digits-v2.onnx" in shell(update, directory, env)
        assert run({"after": after}, directory, env) == {"after": said(after)}
        shell(rollback, directory, env)
        assert_answers(directory, env)
    assert len(said(call)) == 3
    assert len(said(after)) == 1


@pytest.mark.usefixtures("exported")
def test_the_configuration_is_right_and_loads(directory: Path, env: dict[str, str]) -> None:
    config, check = code("Serve it for good", "toml", "sh")
    (directory / "weightd.toml").write_text(config, encoding="utf-8")
    shell(check, directory, env)


@pytest.mark.usefixtures("exported")
def test_a_mindir_is_converted_and_served(directory: Path, env: dict[str, str]) -> None:
    python = mindir.interpreter()
    if python is None:
        if os.environ.get("CI") == "true":
            pytest.fail(mindir.HOW_TO_GET_IT)
        pytest.skip(mindir.HOW_TO_GET_IT)
    convert, serve = code("With MindSpore", "python", "sh")
    output([str(python), "-c", convert], directory, {})
    # The Converter writes a file that its owner alone may read, and not change.
    assert (directory / "digits.mindir").is_file()
    with served(serve, directory, {**env, "MSLITE_PYTHON": str(python)}):
        assert_answers(directory, env)


# --- the page -------------------------------------------------------------------------------------------------------


def test_no_block_is_left_out() -> None:
    tried = {"Export", "Look at it", "Call it", "Serve it for good", "Exchange it", "With MindSpore"}
    assert {name for name, text in SECTIONS.items() if blocks(text)} == tried


def test_links_lead_somewhere_and_lines_are_short() -> None:
    assert broken_links(PAGE) == []
    assert long_lines(PAGE) == []
