"""Tests of the cache of published models on a host: downloads, verification and limit."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from weightd_protocol.errors import FailedPrecondition, Unavailable
from weightd_ray import model_cache
from weightd_ray.model_cache import ModelCache, PublishedFile


class Source:
    """A published model that counts how often it is fetched."""

    def __init__(self, *contents: tuple[str, bytes]) -> None:
        self.contents = contents
        self.fetched = 0
        self.lost = False

    def files(self) -> Sequence[PublishedFile]:
        self.fetched += 1
        return [PublishedFile(name, len(content)) for name, content in self.contents]

    def chunks(self, index: int) -> Iterator[bytes]:
        _, content = self.contents[index]
        for begin in range(0, len(content), 3):
            yield content[begin : begin + 3]
            if self.lost:
                raise Unavailable("it is lost")


def model(content: bytes = b"a model") -> tuple[str, Source]:
    return hashlib.sha256(content).hexdigest(), Source(("m.mindir", content))


def test_fetches_model_once(tmp_path: Path) -> None:
    sha256, source = model()
    for _ in range(2):
        taken = ModelCache(tmp_path).take(sha256, source)
        assert taken.path.read_bytes() == b"a model"
        assert taken.path.name == "m.mindir"
        taken.release()
    assert source.fetched == 1


def test_concurrent_requests_fetch_once(tmp_path: Path) -> None:
    sha256, source = model()
    threads = [threading.Thread(target=ModelCache(tmp_path).take, args=(sha256, source)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert source.fetched == 1


def test_fetches_damaged_model_again(tmp_path: Path) -> None:
    sha256, source = model()
    path = ModelCache(tmp_path).take(sha256, source).path
    path.write_bytes(b"damaged")
    assert ModelCache(tmp_path).take(sha256, source).path.read_bytes() == b"a model"
    assert source.fetched == 2


def test_digest_covers_all_files(tmp_path: Path) -> None:
    graph = Source(("x_graph.mindir", b"graph"), ("x_variables/data", b"weights"))
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in graph.contents]
    taken = ModelCache(tmp_path).take(hashlib.sha256("".join(lines).encode()).hexdigest(), graph)
    assert (taken.path.parent / "x_variables" / "data").read_bytes() == b"weights"


def test_wrong_digest_leaves_no_files(tmp_path: Path) -> None:
    sha256, _ = model()
    with pytest.raises(FailedPrecondition, match=f"with sha256 {sha256}, got [0-9a-f]{{64}}"):
        ModelCache(tmp_path).take(sha256, Source(("m.mindir", b"another")))
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../m", "a/../../m", "", "a\udcff", "a\n"])
def test_rejects_name_outside_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(FailedPrecondition, match="expected names of files inside"):
        ModelCache(tmp_path).take("0" * 64, Source((name, b"m")))


def test_failed_fetch_leaves_no_files(tmp_path: Path) -> None:
    sha256, source = model()
    source.lost = True
    with pytest.raises(Unavailable):
        ModelCache(tmp_path).take(sha256, source)
    source.lost = False
    assert ModelCache(tmp_path).take(sha256, source).path.read_bytes() == b"a model"


def test_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "m.mindir")

    sha256, source = model()
    monkeypatch.setattr(model_cache, "_write", full)
    with pytest.raises(FailedPrecondition, match=r"m\.mindir: No space left on device"):
        ModelCache(tmp_path).take(sha256, source)
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["lock"]


def test_keeps_last_used_models(tmp_path: Path) -> None:
    used = ModelCache(tmp_path).take(*model(b"used"))
    os.utime(used.path.parent.parent, (0, 0))
    for number in range(model_cache.MAX_UNUSED + 2):
        taken = ModelCache(tmp_path).take(*model(b"%d" % number))
        taken.release()
        os.utime(taken.path.parent.parent, (number + 1, number + 1))
    ModelCache(tmp_path).take(*model(b"last")).release()
    there = {each.read_bytes() for each in (tmp_path / "models").glob("*/files/*")}
    assert {b"used", b"last", b"5"} <= there
    assert b"0" not in there
    assert used.path.exists()


def test_removes_files_of_killed_fetch(tmp_path: Path) -> None:
    left = tmp_path / "models" / "staging" / "files"
    left.mkdir(parents=True, mode=0o700)
    (left / "m.mindir").write_bytes(b"half")
    sha256, source = model()
    ModelCache(tmp_path).take(sha256, source)
    assert not left.exists()
