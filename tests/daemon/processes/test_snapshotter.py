from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import pytest

from testkit import models
from weightd_common.modelfiles.files import ModelFileError, copy_identity, digest, model_files
from weightd_daemon.processes import snapshotter
from weightd_daemon.processes.snapshotter import (
    CopyProgressFile,
    SingleFile,
    SnapshotOrder,
    SnapshotRequest,
    identify_files,
    read_copy_progress,
)

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


# --- copied files ---------------------------------------------------------------------------------------------------


def test_copies_all_files_of_a_model_read_only(tmp_path: Path, model: Path, directory: Path) -> None:
    """External data of ONNX, the variables of a MindIR, and the target of a link; nothing else."""
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
        taken = snapshotter.take_snapshot(path, directory)
        copy, sha256, nbytes, known, _ = Path(taken.path), *taken[1:]
        assert (copy, names(directory)) == (directory / path.name, expected)
        assert sha256 == digest(copy) == digest(path)
        assert known == copy_identity(copy)
        assert nbytes == sum(file.nbytes for file in model_files(path))
        assert {mode(each) for each in directory.rglob("*")} == {0o400, *([0o700] if path == graph else [])}
        assert (mode(directory), copy.is_symlink()) == (0o700, False)
        shutil.rmtree(directory)


# --- ways of copying ------------------------------------------------------------------------------------------------

Copy = Callable[[BinaryIO, Path, CopyProgressFile], str]
_copy: Copy = snapshotter._copy_file  # pyright: ignore[reportPrivateUsage]


def clone(writer: int, request: int, reader: int) -> int:
    """Clone a file like a file system that shares blocks."""
    assert request == 0x40049409
    os.pwrite(writer, os.pread(reader, len(CONTENT), 0), 0)
    return 0


@pytest.mark.parametrize("shares_blocks", [True, False])
@pytest.mark.parametrize("block_bytes", [1000, len(CONTENT), 2**20])
def test_copy_is_equal_with_each_way_of_copying(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, shares_blocks: bool, block_bytes: int
) -> None:
    refused = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    monkeypatch.setattr(fcntl, "ioctl", clone if shares_blocks else mock.Mock(side_effect=refused))
    monkeypatch.setattr(snapshotter, "_BLOCK_BYTES", block_bytes)
    taken = snapshotter.take_snapshot(model, directory)
    copy = Path(taken.path)
    model.write_bytes(b"other")
    assert (copy.read_bytes(), mode(copy), taken.sha256) == (CONTENT, 0o400, hashlib.sha256(CONTENT).hexdigest())


# --- reuse of a snapshot --------------------------------------------------------------------------------------------


def make_reusable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file appear unchanged for a minute and stored on a disk, wherever the tests' files are."""
    changed_long_ago(path, monkeypatch)
    monkeypatch.setattr(snapshotter, "_MEMORY_FILE_SYSTEMS", ())


def changed_long_ago(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + 61 * 10**9)


def test_reuses_the_snapshot_of_an_unchanged_file(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.with_external_data(tmp_path / "big.onnx", locations=2)
    make_reusable(model, monkeypatch)
    first = snapshotter.take_snapshot(model, directory)
    monkeypatch.setattr(snapshotter, "_copy_file", mock.Mock(side_effect=AssertionError("copied")))
    again = snapshotter.take_snapshot(model, tmp_path / "again", first)
    assert again == (str(tmp_path / "again" / "big.onnx"), *first[1:3], again.identity, first.source_identity)
    assert again.identity == copy_identity(Path(again.path))
    shutil.rmtree(directory)
    assert digest(Path(again.path)) == first.sha256 == digest(model)


def test_copies_again_after_writes_to_a_mapping(
    tmp_path: Path, model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second write to a dirty page does not change the file's time."""
    changed_long_ago(model, monkeypatch)
    with model.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[0] = 1
        first = snapshotter.take_snapshot(model, directory)
        mapping[0] = 2
        again = snapshotter.take_snapshot(model, tmp_path / "again", first)
    assert (first.sha256, again.sha256) == tuple(
        hashlib.sha256(bytes([each]) + CONTENT[1:]).hexdigest() for each in (1, 2)
    )


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="/dev/shm is missing")
def test_never_reuses_snapshots_of_files_in_memory(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        copy = Path(shutil.copy(model, memory))
        changed_long_ago(copy, monkeypatch)
        assert snapshotter.take_snapshot(copy, directory).source_identity == ""


def _touched(model: Path, copy: Path) -> None:
    os.utime(model)


def _copy_written(model: Path, copy: Path) -> None:
    copy.chmod(0o600)


def _copy_gone(model: Path, copy: Path) -> None:
    shutil.rmtree(copy.parent)


def _no_links(model: Path, copy: Path) -> None:
    pass


_link = os.link


def fail_second_link(source: Path, target: Path) -> None:
    if list(target.parent.iterdir()):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    _link(source, target)


@pytest.mark.parametrize("change", [_touched, _copy_written, _copy_gone, _no_links])
def test_copies_again_if_the_file_may_differ(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None]
) -> None:
    model = models.with_external_data(tmp_path / "big.onnx", locations=1)
    make_reusable(model, monkeypatch)
    first = snapshotter.take_snapshot(model, directory)
    clock = tmp_path / "clock"
    clock.touch()
    while clock.stat().st_ctime_ns <= model.stat().st_ctime_ns:
        clock.touch()
    change(model, Path(first.path))
    if change is _no_links:
        monkeypatch.setattr(os, "link", fail_second_link)
    again = snapshotter.take_snapshot(model, tmp_path / "again", first)
    assert again.sha256 == first.sha256 == digest(Path(again.path))
    assert {path.stat().st_nlink for path in (tmp_path / "again").iterdir()} == {1}


def test_recently_changed_file_has_no_identity(model: Path, directory: Path, tmp_path: Path) -> None:
    """A second change within one tick of the clock would not change the file's time."""
    os.utime(model)
    assert snapshotter.take_snapshot(model, directory).source_identity == ""


# --- errors ---------------------------------------------------------------------------------------------------------


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
def test_rejects_model_that_changes_during_the_copy(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], late: bool
) -> None:
    def changing(source: BinaryIO, target: Path, to: CopyProgressFile) -> str:
        if not late:
            change(model)
        sha256 = _copy(source, target, to)
        if late:
            change(model)
        return sha256

    monkeypatch.setattr(snapshotter, "_copy_file", changing)
    with pytest.raises(ModelFileError) as caught:
        snapshotter.take_snapshot(model, directory)
    assert str(caught.value) == f"{model}: changed while it was copied; load it again once it is complete"


def test_rejects_external_file_that_changes(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.with_external_data(tmp_path / "big.onnx", locations=2)

    def changing(source: BinaryIO, target: Path, to: CopyProgressFile) -> str:
        (tmp_path / "big.w0.bin").touch()
        return _copy(source, target, to)

    monkeypatch.setattr(snapshotter, "_copy_file", changing)
    with pytest.raises(ModelFileError, match="changed while it was copied"):
        snapshotter.take_snapshot(model, directory)


def test_rejects_copy_that_names_other_files(tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is replaced while it is read, and then restored."""
    model = models.with_external_data(tmp_path / "big.onnx", locations=1)
    other = models.with_external_data(tmp_path / "big.x.onnx", locations=2).read_bytes()

    def changing(source: BinaryIO, target: Path, to: CopyProgressFile) -> str:
        sha256 = _copy(source, target, to)
        if target.name == model.name:
            target.chmod(0o600)
            target.write_bytes(other)
            for each in tmp_path.glob("big.x.w*"):
                shutil.copy(each, directory)
        return sha256

    monkeypatch.setattr(snapshotter, "_copy_file", changing)
    with pytest.raises(ModelFileError, match="changed while it was copied"):
        snapshotter.take_snapshot(model, directory)


# --- the process ----------------------------------------------------------------------------------------------------


def test_copies_weights_from_regular_files_only(model: Path, directory: Path, tmp_path: Path) -> None:
    weights, copy = tmp_path / "weights.npz", tmp_path / "copy"
    weights.write_bytes(b"weights")
    wanted, files = [SnapshotRequest(str(model), str(directory))], [SingleFile(str(weights), str(copy))]
    [(sha256, nbytes, *_)] = snapshotter.run_requests(wanted, files)["snapshots"]
    assert (sha256, nbytes) == (digest(model), len(CONTENT))
    assert (copy.read_bytes(), mode(copy)) == (b"weights", 0o400)
    shutil.rmtree(directory)
    weights.unlink()
    os.mkfifo(weights)
    error = f"{weights}: expected a file, got a special file"
    assert snapshotter.run_requests(wanted, files) == {"error": error, "transient": False}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("model", "{model}: No such file or directory"),
        ("directory", "cannot copy {model} to {directory}: File exists"),
        ("disk", "cannot copy {model} to {directory}: No space left on device"),
    ],
)
def test_error_is_one_line(
    model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(snapshotter, "_copy_and_hash", full)
    if fault == "model":
        model.unlink()
    elif fault == "directory":
        directory.mkdir()
    answer = snapshotter.run_requests([SnapshotRequest(str(model), str(directory))])
    error = text.format(model=model, directory=directory)
    assert answer == {"error": error, "transient": fault != "directory"}


def test_skips_copy_if_the_known_digest_differs(model: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(model, (1e9, 1e9))
    monkeypatch.setattr(snapshotter, "_SETTLED_NS", 0)
    monkeypatch.setattr(snapshotter, "_sync_to_disk", lambda file: file.close() or True)
    known = snapshotter.take_snapshot(model, directory)
    assert known.source_identity
    other = directory.with_name("other")
    expected = "0" * 64
    answer = snapshotter.run_requests([SnapshotRequest(str(model), str(other), list(known), expected)])
    error = f"{model}: the file has changed since it was loaded: expected sha256 000000000000, got {known.sha256:.12}"
    assert answer == {"error": error, "transient": False, "changed": True}
    # A copy is made if the known digest is the expected one, and if no digest is known.
    shutil.rmtree(other)
    assert snapshotter.take_snapshot(model, other, known, expected_sha256=known.sha256).sha256 == known.sha256
    shutil.rmtree(other)
    assert snapshotter.take_snapshot(model, other, None, expected_sha256=expected).sha256 == known.sha256


def test_identity_follows_every_file_of_a_model(model: Path, tmp_path: Path) -> None:
    onnx = models.with_external_data(tmp_path / "big.onnx", locations=2)
    inputs = tmp_path / "inputs.npz"
    order = SnapshotOrder(
        [SnapshotRequest(str(each), "copy") for each in (model, onnx)], "progress", [SingleFile(str(inputs), "copy")]
    )
    seen = [identify_files(order)]
    for path, content in (
        (model, CONTENT),
        (tmp_path / "big.w1.bin", b""),
        (tmp_path / "big.w1.bin", b"weights"),
        (inputs, b""),
        (onnx, b"not a model"),
        (onnx, b"no model, either"),
    ):
        path.write_bytes(content)
        assert identify_files(order) == identify_files(order) not in seen
        seen.append(identify_files(order))
    onnx.unlink()
    assert identify_files(order) not in seen


def test_error_names_the_model_that_failed(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.mindir"
    wanted = [SnapshotRequest(str(path), str(tmp_path / f"rank{rank}")) for rank, path in enumerate([model, other])]
    assert snapshotter.run_requests(wanted) == {"error": f"{other}: No such file or directory", "transient": True}
    other.write_bytes(b"other")
    shutil.rmtree(tmp_path / "rank0")
    error = f"cannot copy {other} to {tmp_path / 'rank1'}: File exists"
    assert snapshotter.run_requests(wanted) == {"error": error, "transient": False}
    for rank in (0, 1):
        shutil.rmtree(tmp_path / f"rank{rank}")
    assert [each[0] for each in snapshotter.run_requests(wanted)["snapshots"]] == [digest(model), digest(other)]


# Prints the process's OOM score at its start and at its exit.
SCORE = """
import atexit, pathlib
score = pathlib.Path("/proc/self/oom_score_adj")
before = int(score.read_text())
atexit.register(lambda: print(before, int(score.read_text())))
"""


@pytest.mark.parametrize("limit", ["unlimited", "64"])
def test_runs_as_a_process(model: Path, directory: Path, tmp_path: Path, limit: str) -> None:
    """Its OOM score is higher than the daemon's. A limit on the file size stands for a full disk."""
    argv = snapshotter.command()
    order = SnapshotOrder([SnapshotRequest(str(model), str(directory))], str(tmp_path / "copied")).json().decode()
    argv[argv.index("-c") + 1] = SCORE + argv[argv.index("-c") + 1]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -f {limit}; exec "$0" "$@"', *argv],
        input=order,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answer, scores = done.stdout.splitlines()
    assert json.loads(answer)["identity"] == identify_files(SnapshotOrder.from_json(order.encode()))
    before, after = map(int, scores.split())
    assert (done.stderr, after) == ("", min(before + 400, 1000))
    if limit == "unlimited":
        assert (done.returncode, json.loads(answer)["snapshots"][0][0]) == (0, digest(model))
        nbytes = sum(file.nbytes for file in model_files(model))
        assert read_copy_progress(tmp_path / "copied") == (nbytes, nbytes)
    else:
        error = f"cannot copy {model} to {directory}: File too large"
        assert (done.returncode, json.loads(answer)["error"], json.loads(answer)["transient"]) == (1, error, False)


def test_reports_copied_and_total_bytes(tmp_path: Path) -> None:
    path = tmp_path / "copied"
    written = CopyProgressFile(path, model_count=3)
    assert read_copy_progress(path) is None
    written.start_model(100)
    written.add_bytes(60)
    # Files that are not open yet count with the mean size of the others.
    assert read_copy_progress(path) == (60, 300)
    written.add_bytes(40)
    written.start_model(200)
    written.add_bytes(10)
    assert read_copy_progress(path) == (110, 450)
    written.close()
    written.add_bytes(1)
    assert read_copy_progress(path) == (110, 450)


def test_invalid_progress_file_is_ignored(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("short", b"x" * 15), ("more than all", b"\xff" * 8 + b"\0" * 8)):
        (tmp_path / name).write_bytes(content)
        assert read_copy_progress(tmp_path / name) is None
    (tmp_path / "link").symlink_to(tmp_path / "short")
    assert read_copy_progress(tmp_path / "link") is None
    assert read_copy_progress(tmp_path / "none") is None


def test_copies_without_a_progress_file(tmp_path: Path) -> None:
    written = CopyProgressFile(tmp_path / "none" / "copied")
    written.start_model(1)
    written.add_bytes(1)
    written.close()
