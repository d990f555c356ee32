from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from testkit import models
from weightd.daemon.children import snapshotter
from weightd.shared.modelfile import ModelFileError, digest

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "digits.mindir"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    os.utime(path, ns=(0, 0))
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# --- what is copied -------------------------------------------------------------------------------------------------


def test_what_belongs_to_a_model_is_copied(tmp_path: Path, model: Path, directory: Path) -> None:
    """External data of ONNX, the variables of a MindIR, and what a link stands for: read-only, and nothing else."""
    onnx = models.with_external_data(tmp_path / "big.onnx", locations=2)
    graph = tmp_path / "big_graph.mindir"
    graph.write_bytes(b"graph")
    (tmp_path / "big_variables").mkdir()
    for each in ("data_0", "data_1"):
        (tmp_path / "big_variables" / each).write_bytes(each.encode())
    link = tmp_path / "link.mindir"
    link.symlink_to(model)
    for path, expected in (
        (onnx, {"big.onnx", "big.w0.bin", "big.w1.bin"}),
        (graph, {"big_graph.mindir", "big_variables/data_0", "big_variables/data_1"}),
        (link, {"link.mindir"}),
    ):
        copy = snapshotter.take(path, directory)
        assert (copy, names(directory)) == (directory / path.name, expected)
        assert digest(copy) == digest(path)
        assert {mode(each) for each in directory.rglob("*")} == {0o400, *([0o700] if path == graph else [])}
        assert (mode(directory), copy.is_symlink()) == (0o700, False)
        shutil.rmtree(directory)


# --- how it is copied -----------------------------------------------------------------------------------------------

CopyFileRange = Callable[[int, int, int], int]
_copy_file_range: CopyFileRange = os.copy_file_range


def not_here(source: int, target: int, count: int) -> int:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def nothing(source: int, target: int, count: int) -> int:
    return 0


def little_by_little(source: int, target: int, count: int) -> int:
    return _copy_file_range(source, target, min(count, 10_000))


@pytest.mark.parametrize("first", [[], [little_by_little] * 3], ids=["from the beginning", "after some of it"])
@pytest.mark.parametrize("then", [not_here, nothing, little_by_little])
def test_the_copy_is_equal_however_it_is_made(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, first: list[CopyFileRange], then: CopyFileRange
) -> None:
    ways = iter(first)

    def copy_file_range(source: int, target: int, count: int) -> int:
        return next(ways, then)(source, target, count)

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    copy = snapshotter.take(model, directory)
    model.write_bytes(b"other")
    assert (copy.read_bytes(), mode(copy)) == (CONTENT, 0o400)


# --- what goes wrong ------------------------------------------------------------------------------------------------


def _rewritten(model: Path) -> None:
    model.write_bytes(b"other" + CONTENT[5:])


def _longer(model: Path) -> None:
    with model.open("ab") as file:
        file.write(b"more")


def _shorter(model: Path) -> None:
    os.truncate(model, 1000)


def _replaced(model: Path) -> None:
    status = model.stat()
    twin = model.with_name("twin")
    twin.write_bytes(CONTENT[::-1])
    os.utime(twin, ns=(status.st_atime_ns, status.st_mtime_ns))
    twin.rename(model)


@pytest.mark.parametrize("change", [_rewritten, _longer, _shorter, _replaced])
@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_a_model_that_changes_while_it_is_copied_is_refused(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], late: bool
) -> None:
    def changing(source: int, target: int, count: int) -> int:
        if not late:
            change(model)
        copied = _copy_file_range(source, target, count)
        if late:
            change(model)
        return copied

    monkeypatch.setattr(os, "copy_file_range", changing)
    with pytest.raises(ModelFileError) as caught:
        snapshotter.take(model, directory)
    assert str(caught.value) == f"{model}: changed while it was copied; load it again once it is complete"


def test_an_external_file_that_changes_is_refused(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.with_external_data(tmp_path / "big.onnx", locations=2)

    def changing(source: int, target: int, count: int) -> int:
        os.utime(tmp_path / "big.w0.bin")
        return _copy_file_range(source, target, count)

    os.utime(tmp_path / "big.w0.bin", ns=(0, 0))
    monkeypatch.setattr(os, "copy_file_range", changing)
    with pytest.raises(ModelFileError, match="changed while it was copied"):
        snapshotter.take(model, directory)


# --- the process ----------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Path) -> tuple[int, str]:
    """Return the exit status, and the error if there is one."""
    monkeypatch.setattr(sys, "argv", ["snapshot", *map(str, arguments)])
    status = snapshotter.main()
    out, err = capsys.readouterr()
    assert err == ""
    return status, json.loads(out).get("error", "")


def test_weights_are_copied_from_a_file_only(
    model: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, copy = tmp_path / "weights.npz", tmp_path / "copy"
    weights.write_bytes(b"weights")
    assert run(monkeypatch, capsys, model, directory, weights, copy) == (0, "")
    assert (copy.read_bytes(), mode(copy)) == (b"weights", 0o400)
    shutil.rmtree(directory)
    weights.unlink()
    os.mkfifo(weights)
    error = f"{weights}: expected a file, got a special file"
    assert run(monkeypatch, capsys, model, directory, weights, copy) == (1, error)


@pytest.mark.parametrize(
    ("spoilt", "text"),
    [
        ("model", "{model}: No such file or directory"),
        ("directory", "cannot copy {model} to {directory}: File exists"),
        ("disk", "cannot copy {model} to {directory}: No space left on device"),
    ],
)
def test_what_goes_wrong_is_answered_in_a_line(
    model: Path,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoilt: str,
    text: str,
) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    if spoilt == "model":
        model.unlink()
    elif spoilt == "directory":
        directory.mkdir()
    assert run(monkeypatch, capsys, model, directory) == (1, text.format(model=model, directory=directory))
    assert not directory.exists() or names(directory) == set()


# Runs the module as it is run, and looks at its score for the end by want of memory when it ends.
RUN = """
import atexit, pathlib, runpy, sys
score = pathlib.Path("/proc/self/oom_score_adj")
before = int(score.read_text())
atexit.register(lambda: print(before, int(score.read_text())))
runpy.run_module("weightd.daemon.children.snapshotter", run_name="__main__")
"""


@pytest.mark.parametrize("limit", ["unlimited", "64"])
def test_as_the_process_that_it_is(model: Path, directory: Path, limit: str) -> None:
    """It goes before the daemon when memory runs out. A limit on the size of files stands in for the full disk."""
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'ulimit -f {limit}; exec "$0" "$@"',
            sys.executable,
            "-c",
            RUN,
            str(os.getpid()),
            model,
            directory,
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=60,
        check=False,
    )
    answer, scores = done.stdout.splitlines()
    before, after = map(int, scores.split())
    assert (done.stderr, after) == ("", min(before + 400, 1000))
    if limit == "unlimited":
        assert (done.returncode, json.loads(answer)) == (0, {"sha256": digest(model), "nbytes": len(CONTENT)})
    else:
        error = f"cannot copy {model} to {directory}: File too large"
        assert (done.returncode, json.loads(answer)) == (1, {"error": error})
