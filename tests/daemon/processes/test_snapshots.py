"""Snapshots of small files, taken by real processes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weightd_common.modelfiles.files import copy_identity
from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes import snapshotter
from weightd_daemon.processes.device_probe import DeviceProbe
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.snapshots import SnapshotService, snapshot_directory_name
from weightd_daemon.processes.snapshotter import SnapshotResult, identify_files

SHA = "5" * 64


class SnapshotHarness:
    """A snapshot service and the outcomes it reports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "private"
        self.directory.mkdir()
        self.loop = EventLoop()
        self.table = ProcessTable(self.loop)
        self.later: list[Callable[[float], None]] = []
        self.snapshots = SnapshotService(self.directory, self.table, DeviceProbe(self.table, {}), self.later.append)
        self.outcomes: list[Any] = []
        self.config = ModelConfig(str(directory / "m.mindir"), "mindspore_lite", "/python")
        self.source = ModelSource(self.config.path, number=3)
        Path(self.config.path).write_bytes(b"a model")

    def take(self, config: ModelConfig | None = None, expected: str = "") -> None:
        owner: Any = self
        self.snapshots.take_snapshot(owner, "m", config or self.config, self.source, expected)

    def wait(self) -> None:
        while self.table.processes:
            self.loop.run_once(30)

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        self.outcomes.append((source, snapshot))

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        self.outcomes.append((source, cause))
        self.transient = is_transient


def ordered(monkeypatch: pytest.MonkeyPatch) -> list[snapshotter.SnapshotOrder]:
    """Return a list that collects the orders given to the snapshot process."""
    orders: list[snapshotter.SnapshotOrder] = []

    def json(order: snapshotter.SnapshotOrder) -> bytes:
        orders.append(order)
        return b""

    monkeypatch.setattr(snapshotter.SnapshotOrder, "json", json)
    return orders


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SnapshotHarness]:
    harness = SnapshotHarness(tmp_path)
    yield harness
    harness.table.kill_all()
    harness.wait()
    harness.loop.close()


def test_reports_the_content_of_a_snapshot(harness: SnapshotHarness, tmp_path: Path) -> None:
    weights, sample = tmp_path / "w.npz", tmp_path / "s.npz"
    weights.write_bytes(b"weights")
    sample.write_bytes(b"a sample")
    harness.source = replace(harness.source, weights=str(weights))
    harness.take(replace(harness.config, selftest=str(sample)))
    harness.wait()
    [(source, snapshot)] = harness.outcomes
    assert source == harness.source
    assert (snapshot.sha256, snapshot.nbytes) == (hashlib.sha256(b"a model").hexdigest(), 7)
    assert snapshot.identity == copy_identity(Path(snapshot.path))
    copies = [Path(each) for each in (snapshot.path, snapshot.weights, snapshot.sample)]
    assert harness.snapshots.copy_progress("m", harness.source) == (7, 7)
    assert harness.snapshots.copy_progress("m", replace(harness.source, number=4)) is None
    assert [each.read_bytes() for each in copies] == [b"a model", b"weights", b"a sample"]
    assert all(each.is_relative_to(harness.directory / snapshot_directory_name("m", 3)) for each in copies)
    harness.snapshots.remove_snapshot("m", harness.source)
    assert list(harness.directory.iterdir()) == []


def test_reuses_the_newest_snapshot_not_removed(harness: SnapshotHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"snapshots": [[SHA, 7, "known", "from"]]})
    monkeypatch.setattr(snapshotter, "command", mock.Mock(return_value=["echo", answer]))
    orders = ordered(monkeypatch)
    for number, gone in ((3, 0), (4, 3), (5, 5), (6, 0)):
        harness.source = replace(harness.source, number=number)
        harness.take()
        harness.wait()
        harness.snapshots.remove_snapshot("m", replace(harness.source, number=gone))
    taken = [SnapshotResult(snapshot.path, SHA, 7, "known", "from") for _, snapshot in harness.outcomes]
    assert [each.requests[0].previous for each in orders] == [None, *taken[:2], None]


def test_remembers_the_files_that_a_load_has_read(harness: SnapshotHarness) -> None:
    order = harness.snapshots.order("m", harness.config, harness.source)
    read = identify_files(order)
    harness.take(replace(harness.config, selftest="/none.npz"))
    harness.wait()
    assert "/none.npz" in harness.outcomes[-1][1]
    assert harness.snapshots.identity("m", harness.source) != read
    harness.take()
    harness.wait()
    Path(harness.config.path).write_bytes(b"another model")
    assert harness.snapshots.identity("m", harness.source) == read != identify_files(order)
    assert harness.snapshots.identity("m", replace(harness.source, number=4)) == ""


def test_reads_each_file_with_the_grant_of_its_user(harness: SnapshotHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = ordered(monkeypatch)
    alice, bob = Grant(1, (2,)), Grant(3, (), ("/models",))
    harness.source = replace(harness.source, weights="/w.npz", grant=alice, weights_grant=bob)
    harness.take(replace(harness.config, selftest="/s.npz"))
    [order] = orders
    assert [each.grant for each in order.requests] == [alice]
    assert {each.path: each.grant for each in order.files} == {"/w.npz": bob, "/s.npz": OPERATOR}


def test_rejects_files_that_the_user_cannot_read(harness: SnapshotHarness) -> None:
    if os.geteuid():
        pytest.skip("needs root to read files as another user")
    Path(harness.config.path).chmod(0o600)
    harness.source = replace(harness.source, grant=Grant(61001))
    harness.take()
    harness.wait()
    [(_, cause)] = harness.outcomes
    assert "uid 61001, which names the file" in cause
    assert list(harness.directory.iterdir()) == []


def test_takes_snapshots_of_all_slices(harness: SnapshotHarness, tmp_path: Path) -> None:
    ranks = RanksConfig(size=2, groups=(("ascend:0", "ascend:1"),) * 2, rank_table=str(tmp_path / "t{group}.json"))
    ranks = replace(ranks, group_info_file=str(tmp_path / "g"))
    for name in ("t0.json", "t1.json", "g"):
        (tmp_path / name).write_text(name)
    digests: list[str] = []
    for rank in range(2):
        content = f"slice {rank}".encode()
        (tmp_path / f"m{rank}.mindir").write_bytes(content)
        digests.append(hashlib.sha256(content).hexdigest())
    harness.source = ModelSource(str(tmp_path / "m{rank}.mindir"), number=3)
    harness.take(replace(harness.config, path=harness.source.path, ranks=ranks))
    harness.wait()
    [(_, snapshot)] = harness.outcomes
    assert (snapshot.path, snapshot.nbytes) == (snapshot.slices[0].path, 14)
    assert snapshot.sha256 == hashlib.sha256("".join(f"{each}\n" for each in digests).encode()).hexdigest()
    for rank, each in enumerate(snapshot.slices):
        assert (each.sha256, each.nbytes, Path(each.path).name) == (digests[rank], 7, f"m{rank}.mindir")
        assert each.identity == copy_identity(Path(each.path))
        assert Path(each.group_info).read_text() == "g"
    assert [Path(each).read_text() for each in snapshot.rank_tables] == ["t0.json", "t1.json"]
    assert all(Path(each).is_relative_to(harness.directory) for each in snapshot.rank_tables)


def test_reports_failure_and_removes_its_files(harness: SnapshotHarness) -> None:
    Path(harness.config.path).unlink()
    harness.take()
    harness.wait()
    assert harness.outcomes == [(harness.source, f"{harness.config.path}: No such file or directory")]
    assert harness.transient
    assert list(harness.directory.iterdir()) == []


def test_removed_snapshot_is_not_finished(harness: SnapshotHarness) -> None:
    harness.take()
    harness.snapshots.remove_snapshot("m", harness.source)
    harness.wait()
    assert harness.outcomes == [(harness.source, "the snapshot process killed by SIGKILL (sent by weightd)")]
    assert list(harness.directory.iterdir()) == []


def test_retaken_snapshot_must_have_the_same_content(harness: SnapshotHarness) -> None:
    sha256 = hashlib.sha256(b"a model").hexdigest()
    # The whole cache directory has been deleted.
    harness.directory.rmdir()
    harness.take(expected=sha256)
    harness.wait()
    [(_, snapshot)] = harness.outcomes
    assert (snapshot.sha256, harness.directory.stat().st_mode & 0o777) == (sha256, 0o700)
    # Only the copy of the model has been deleted.
    Path(snapshot.path).unlink()
    harness.take(expected=sha256)
    harness.wait()
    assert Path(harness.outcomes[1][1].path).read_bytes() == b"a model"
    Path(harness.config.path).write_bytes(b"another")
    harness.take(expected=sha256)
    harness.wait()
    (_, cause), other = harness.outcomes[2], hashlib.sha256(b"another").hexdigest()
    assert f"the file has changed since it was loaded: expected sha256 {sha256:.12}, got {other:.12}; " in cause
    assert "weightctl update" in cause
    assert list(harness.directory.iterdir()) == []
    assert not harness.transient


def test_lost_weights_file_cannot_be_verified(harness: SnapshotHarness, tmp_path: Path) -> None:
    harness.source = replace(harness.source, weights=str(tmp_path / "w.npz"))
    harness.take(expected="5" * 64)
    harness.later[0](0.0)
    assert "w.npz is missing, and that file may have changed" in harness.outcomes[0][1]


def test_start_failure_is_reported_from_the_loop(harness: SnapshotHarness) -> None:
    harness.directory.rmdir()
    harness.directory.touch()
    harness.take()
    assert (harness.outcomes, len(harness.later)) == ([], 1)
    harness.later[0](0.0)
    assert harness.outcomes[0][1].startswith("cannot take a snapshot: cannot make the directory ")


@pytest.mark.parametrize("is_started", [True, False])
def test_failure_names_the_exceeded_limit(
    harness: SnapshotHarness, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*arguments: Any, **named: Any) -> None:
        if not is_started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        arguments[4]({"error": "cannot copy /m to /c: Too many open files"}, ExitCause(1))

    monkeypatch.setattr("weightd_daemon.processes.snapshots.run_oneshot", ask)
    harness.take()
    for each in harness.later:
        each(0.0)
    limit = "cannot open a file" if is_started else "cannot start a process or thread"
    assert harness.outcomes[0][1].startswith(f"{limit}: the limit of ")
