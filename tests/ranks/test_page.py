"""docs/ranks.md and the scripts of examples/ranks: the page shows the scripts, and they do what the page describes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testkit.ranks import EXAMPLE, REPOSITORY, Slices
from weightd_common.modelfiles import mindir

PAGE = (REPOSITORY / "docs" / "ranks.md").read_text("utf-8")
SCRIPTS = [each.read_text("utf-8") for each in sorted(EXAMPLE.iterdir()) if each.is_file()]
SHOWN = re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("text", SHOWN)
def test_code_of_page_is_in_scripts(text: str) -> None:
    assert any(text in script for script in SCRIPTS)


def test_page_has_code() -> None:
    assert len(SHOWN) > 5


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_have_signature_of_page(slices: Slices, rank: int) -> None:
    with slices.paths[rank].open("rb") as file:
        found = mindir.read(file)
    assert found.is_mindspore_export
    assert [tuple(each) for each in found.inputs] == [("x", "FP32", (-1, 16))]
    assert [tuple(each) for each in found.outputs] == [("output_0", "FP32", (-1, 8))]
    content = slices.paths[rank].read_bytes()
    assert b"mccl_world_group" in content


def test_self_test_has_all_inputs_and_outputs(slices: Slices) -> None:
    with np.load(slices.selftest_path) as selftest:
        assert {name: selftest[name].shape for name in selftest} == {"x": (4, 16), "output_0": (4, 8)}


@pytest.fixture
def configuration(slices: Slices, python: Path, tmp_path: Path) -> Path:
    """The configuration of the page beside its files, with a separate socket and directories."""
    for each in (*slices.paths, slices.selftest_path):
        shutil.copy(each, tmp_path)
    text = (EXAMPLE / "weightd.toml").read_text("utf-8").replace("/opt/mindspore/bin/python", str(python))
    own = {"socket": f"ipc://{tmp_path}/weightd.sock", "runtime_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    lines = [f'{key} = "{value}"\n' for key, value in own.items()]
    file = tmp_path / "weightd.toml"
    file.write_text("".join(["[daemon]\n", *lines, text]), "utf-8")
    return file


def weightd(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "weightd_daemon", *map(str, arguments)]


def test_ranks_configuration_is_valid(configuration: Path) -> None:
    done = subprocess.run(weightd("check", configuration), capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_example_serves_and_calls(configuration: Path, slices: Slices) -> None:
    socket = configuration.parent / "weightd.sock"
    call = [sys.executable, str(EXAMPLE / "call.py"), str(slices.selftest_path), "--socket", str(socket)]
    with subprocess.Popen(weightd("serve", configuration), stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr
            assert next(line for line in daemon.stderr if "listens on" in line)
            done = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
            assert done.returncode == 0, done.stderr
            assert float(done.stdout.split()[-1]) < 1e-5
        finally:
            daemon.terminate()
            rest = daemon.communicate(timeout=60)[1]
    assert daemon.returncode == 0, rest
