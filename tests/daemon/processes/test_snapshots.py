"""Snapshots that real processes take of small files."""

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

from weightd_common.modelfiles.files import files_identity, model_files
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
from weightd_daemon.processes.snapshotter import SnapshotResult

SHA = "5" * 64


class Scene:
    """An owner, and what it is told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "private"
        self.directory.mkdir()
        self.loop = EventLoop()
        self.running = ProcessTable(self.loop)
        self.later: list[Callable[[float], None]] = []
        self.pinning = SnapshotService(self.directory, self.running, DeviceProbe(self.running, {}), self.later.append)
        self.told: list[Any] = []
        self.config = ModelConfig(str(directory / "m.mindir"), "mindspore_lite", "/python")
        self.source = ModelSource(self.config.path, number=3)
        Path(self.config.path).write_bytes(b"a model")

    def pin(self, config: ModelConfig | None = None, expected: str = "") -> None:
        owner: Any = self
        self.pinning.take_snapshot(owner, "m", config or self.config, self.source, expected)

    def wait(self) -> None:
        while self.running.processes:
            self.loop.run_once(30)

    def on_snapshot_taken(self, source: ModelSource, snapshot: Snapshot, now: float) -> None:
        self.told.append((source, snapshot))

    def on_snapshot_failed(self, source: ModelSource, cause: str, now: float, *, is_transient: bool = False) -> None:
        self.told.append((source, cause))
        self.transient = is_transient


def ordered(monkeypatch: pytest.MonkeyPatch) -> list[snapshotter.SnapshotOrder]:
    """Return a list to which each order is added that is given to the process that takes snapshots."""
    orders: list[snapshotter.SnapshotOrder] = []

    def json(order: snapshotter.SnapshotOrder) -> bytes:
        orders.append(order)
        return b""

    monkeypatch.setattr(snapshotter.SnapshotOrder, "json", json)
    return orders


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.running.kill_all()
    scene.wait()
    scene.loop.close()


def test_a_snapshot_is_told_with_what_it_holds(scene: Scene, tmp_path: Path) -> None:
    weights, sample = tmp_path / "w.npz", tmp_path / "s.npz"
    weights.write_bytes(b"weights")
    sample.write_bytes(b"a sample")
    scene.source = replace(scene.source, weights=str(weights))
    scene.pin(replace(scene.config, selftest=str(sample)))
    scene.wait()
    [(source, snapshot)] = scene.told
    assert source == scene.source
    assert (snapshot.sha256, snapshot.nbytes) == (hashlib.sha256(b"a model").hexdigest(), 7)
    assert snapshot.identity == files_identity(model_files(Path(snapshot.path)))
    copies = [Path(each) for each in (snapshot.path, snapshot.weights, snapshot.sample)]
    assert scene.pinning.copy_progress("m", scene.source) == (7, 7)
    assert scene.pinning.copy_progress("m", replace(scene.source, number=4)) is None
    assert [each.read_bytes() for each in copies] == [b"a model", b"weights", b"a sample"]
    assert all(each.is_relative_to(scene.directory / snapshot_directory_name("m", 3)) for each in copies)
    scene.pinning.remove_snapshot("m", scene.source)
    assert list(scene.directory.iterdir()) == []


def test_what_was_taken_of_a_file_is_known_until_it_is_removed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"snapshots": [[SHA, 7, "known", "from"]]})
    monkeypatch.setattr(snapshotter, "command", mock.Mock(return_value=["echo", answer]))
    orders = ordered(monkeypatch)
    for number, gone in ((3, 0), (4, 3), (5, 5), (6, 0)):
        scene.source = replace(scene.source, number=number)
        scene.pin()
        scene.wait()
        scene.pinning.remove_snapshot("m", replace(scene.source, number=gone))
    taken = [SnapshotResult(snapshot.path, SHA, 7, "known", "from") for _, snapshot in scene.told]
    assert [each.requests[0].previous for each in orders] == [None, *taken[:2], None]


def test_each_file_is_read_by_the_right_by_which_it_was_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = ordered(monkeypatch)
    alice, bob = Grant(1, (2,)), Grant(3, (), ("/models",))
    scene.source = replace(scene.source, weights="/w.npz", grant=alice, weights_grant=bob)
    scene.pin(replace(scene.config, selftest="/s.npz"))
    [order] = orders
    assert [each.grant for each in order.requests] == [alice]
    assert {each.path: each.grant for each in order.files} == {"/w.npz": bob, "/s.npz": OPERATOR}


def test_a_user_names_what_the_user_may_read(scene: Scene) -> None:
    if os.geteuid():
        pytest.skip("for this user every file is its own")
    Path(scene.config.path).chmod(0o600)
    scene.source = replace(scene.source, grant=Grant(61001))
    scene.pin()
    scene.wait()
    [(_, cause)] = scene.told
    assert "uid 61001, which names the file" in cause
    assert list(scene.directory.iterdir()) == []


def test_a_model_that_is_cut_has_a_snapshot_of_all_its_slices(scene: Scene, tmp_path: Path) -> None:
    ranks = RanksConfig(size=2, groups=(("ascend:0", "ascend:1"),) * 2, rank_table=str(tmp_path / "t{group}.json"))
    ranks = replace(ranks, group_info_file=str(tmp_path / "g"))
    for name in ("t0.json", "t1.json", "g"):
        (tmp_path / name).write_text(name)
    digests: list[str] = []
    for rank in range(2):
        content = f"slice {rank}".encode()
        (tmp_path / f"m{rank}.mindir").write_bytes(content)
        digests.append(hashlib.sha256(content).hexdigest())
    scene.source = ModelSource(str(tmp_path / "m{rank}.mindir"), number=3)
    scene.pin(replace(scene.config, path=scene.source.path, ranks=ranks))
    scene.wait()
    [(_, snapshot)] = scene.told
    assert (snapshot.path, snapshot.nbytes) == (snapshot.slices[0].path, 14)
    assert snapshot.sha256 == hashlib.sha256("".join(f"{each}\n" for each in digests).encode()).hexdigest()
    for rank, each in enumerate(snapshot.slices):
        assert (each.sha256, each.nbytes, Path(each.path).name) == (digests[rank], 7, f"m{rank}.mindir")
        assert each.identity == files_identity(model_files(Path(each.path)))
        assert Path(each.group_info).read_text() == "g"
    assert [Path(each).read_text() for each in snapshot.rank_tables] == ["t0.json", "t1.json"]
    assert all(Path(each).is_relative_to(scene.directory) for each in snapshot.rank_tables)


def test_one_that_cannot_be_taken_is_told_with_the_cause_and_leaves_nothing(scene: Scene) -> None:
    Path(scene.config.path).unlink()
    scene.pin()
    scene.wait()
    assert scene.told == [(scene.source, f"{scene.config.path}: No such file or directory")]
    assert scene.transient
    assert list(scene.directory.iterdir()) == []


def test_one_that_nobody_wants_any_more_is_not_taken_to_its_end(scene: Scene) -> None:
    scene.pin()
    scene.pinning.remove_snapshot("m", scene.source)
    scene.wait()
    assert scene.told == [(scene.source, "the snapshot process killed by SIGKILL (sent by weightd)")]
    assert list(scene.directory.iterdir()) == []


def test_a_snapshot_that_is_taken_anew_has_to_be_the_same(scene: Scene) -> None:
    sha256 = hashlib.sha256(b"a model").hexdigest()
    # All of the cache has vanished.
    scene.directory.rmdir()
    scene.pin(expected=sha256)
    scene.wait()
    [(_, snapshot)] = scene.told
    assert (snapshot.sha256, scene.directory.stat().st_mode & 0o777) == (sha256, 0o700)
    # Only a part of it.
    Path(snapshot.path).unlink()
    scene.pin(expected=sha256)
    scene.wait()
    assert Path(scene.told[1][1].path).read_bytes() == b"a model"
    Path(scene.config.path).write_bytes(b"another")
    scene.pin(expected=sha256)
    scene.wait()
    (_, cause), other = scene.told[2], hashlib.sha256(b"another").hexdigest()
    assert f"the file has changed since it was loaded: expected sha256 {sha256:.12}, got {other:.12}; " in cause
    assert "weightctl update" in cause
    assert list(scene.directory.iterdir()) == []
    assert not scene.transient


def test_of_weights_nobody_knows_whether_they_are_the_same(scene: Scene, tmp_path: Path) -> None:
    scene.source = replace(scene.source, weights=str(tmp_path / "w.npz"))
    scene.pin(expected="5" * 64)
    scene.later[0](0.0)
    assert "w.npz is missing, and that file may have changed" in scene.told[0][1]


def test_what_cannot_be_begun_is_told_later(scene: Scene) -> None:
    scene.directory.rmdir()
    scene.directory.touch()
    scene.pin()
    assert (scene.told, len(scene.later)) == ([], 1)
    scene.later[0](0.0)
    assert scene.told[0][1].startswith("cannot take a snapshot: cannot make the directory ")


@pytest.mark.parametrize("is_started", [True, False])
def test_the_limit_is_named_that_keeps_a_snapshot_from_being_taken(
    scene: Scene, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*arguments: Any, **named: Any) -> None:
        if not is_started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        arguments[4]({"error": "cannot copy /m to /c: Too many open files"}, ExitCause(1))

    monkeypatch.setattr("weightd_daemon.processes.snapshots.run_oneshot", ask)
    scene.pin()
    for each in scene.later:
        each(0.0)
    limit = "cannot open a file" if is_started else "cannot start a process or thread"
    assert scene.told[0][1].startswith(f"{limit}: the limit of ")
