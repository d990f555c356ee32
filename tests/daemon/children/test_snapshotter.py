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
from typing import Any

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
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


# --- what is copied -------------------------------------------------------------------------------------------------


def test_the_copy_is_equal_private_and_read_only(model: Path, directory: Path) -> None:
    copy = snapshotter.take(model, directory)
    assert copy == directory / "digits.mindir"
    assert copy.read_bytes() == CONTENT
    assert (mode(directory), mode(copy)) == (0o700, 0o400)
    assert names(directory) == {"digits.mindir"}
    with model.open("r+b") as file:
        file.write(b"other")
    assert copy.read_bytes() == CONTENT


def test_external_data_of_onnx_is_copied(tmp_path: Path, directory: Path) -> None:
    model = models.with_external_data(tmp_path / "big.onnx", locations=2)
    (tmp_path / "unrelated.bin").write_bytes(b"x")
    copy = snapshotter.take(model, directory)
    assert names(directory) == {"big.onnx", "big.w0.bin", "big.w1.bin"}
    assert digest(copy) == digest(model)
    assert {mode(path) for path in directory.iterdir()} == {0o400}


def test_variables_of_mindir_are_copied(tmp_path: Path, directory: Path) -> None:
    model = tmp_path / "big_graph.mindir"
    model.write_bytes(b"graph")
    (tmp_path / "big_variables").mkdir()
    for each in ("data_0", "data_1"):
        (tmp_path / "big_variables" / each).write_bytes(each.encode())
    copy = snapshotter.take(model, directory)
    assert names(directory) == {"big_graph.mindir", "big_variables/data_0", "big_variables/data_1"}
    assert digest(copy) == digest(model)
    assert mode(directory / "big_variables") == 0o700


def test_a_model_that_is_a_link_is_copied_not_linked(model: Path, directory: Path) -> None:
    link = model.with_name("link.mindir")
    link.symlink_to(model)
    copy = snapshotter.take(link, directory)
    assert not copy.is_symlink()
    assert copy.read_bytes() == CONTENT


# --- how it is copied -----------------------------------------------------------------------------------------------

CopyFileRange = Callable[[int, int, int], int]
_copy_file_range: CopyFileRange = os.copy_file_range


def not_here(source: int, target: int, count: int) -> int:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def nothing(source: int, target: int, count: int) -> int:
    return 0


def little_by_little(source: int, target: int, count: int) -> int:
    return _copy_file_range(source, target, min(count, 10_000))


class Breaks:
    """Copies some, then says that it cannot."""

    def __init__(self, then: CopyFileRange) -> None:
        self.then = then
        self.calls = 0

    def __call__(self, source: int, target: int, count: int) -> int:
        self.calls += 1
        return little_by_little(source, target, count) if self.calls <= 3 else self.then(source, target, count)


@pytest.mark.parametrize(
    "copy_file_range",
    [not_here, nothing, little_by_little, Breaks(not_here), Breaks(nothing)],
    ids=["not here", "nothing", "little by little", "breaks", "ends early"],
)
def test_the_copy_is_equal_however_it_is_made(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, copy_file_range: CopyFileRange
) -> None:
    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    copy = snapshotter.take(model, directory)
    assert copy.read_bytes() == CONTENT
    assert mode(copy) == 0o400


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
    os.utime(model, ns=(0, 0))

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


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["snapshot", *map(str, arguments)])
    return snapshotter.main()


def answered(capsys: pytest.CaptureFixture[str]) -> Any:
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_weights_are_copied_from_a_file_only(
    model: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, copy = tmp_path / "weights.npz", tmp_path / "copy"
    weights.write_bytes(b"weights")
    assert run(monkeypatch, model, directory, weights, copy) == 0
    assert (copy.read_bytes(), mode(copy)) == (b"weights", 0o400)
    shutil.rmtree(directory)
    weights.unlink()
    os.mkfifo(weights)
    capsys.readouterr()
    assert run(monkeypatch, model, directory, weights, copy) == 1
    assert answered(capsys) == {"error": f"{weights}: expected a file, got a special file"}


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr(shutil, "copyfileobj", full)
    if spoilt == "model":
        model.unlink()
    elif spoilt == "directory":
        directory.mkdir()
    assert run(monkeypatch, model, directory) == 1
    assert answered(capsys) == {"error": text.format(model=model, directory=directory)}
    assert not directory.exists() or names(directory) == set()


def test_as_the_process_that_it_is(model: Path, directory: Path) -> None:
    """A limit on the size of files stands in for the full disk: both copies fail in the kernel."""
    command = ["sh", "-c", 'ulimit -f 64; exec "$0" -m weightd.daemon.children.snapshotter "$1" "$2" "$3"']
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*command, sys.executable, str(os.getpid()), str(model), str(directory)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout) == {"error": f"cannot copy {model} to {directory}: File too large"}


# Runs the module as it is run, and looks at its score for the end by want of memory when it ends.
RUN = """
import atexit, pathlib, runpy, sys
score = pathlib.Path("/proc/self/oom_score_adj")
before = int(score.read_text())
atexit.register(lambda: print(before, int(score.read_text())))
runpy.run_module("weightd.daemon.children.snapshotter", run_name="__main__")
"""


def test_it_goes_before_the_daemon_when_memory_runs_out(model: Path, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(os.getpid()), str(model), str(directory)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=60,
        check=True,
    )
    taken, scores = done.stdout.splitlines()
    assert json.loads(taken) == {"sha256": digest(model), "nbytes": len(CONTENT)}
    before, after = map(int, scores.split())
    assert after == min(before + 400, 1000)
