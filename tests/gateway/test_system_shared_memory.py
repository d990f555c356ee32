"""Tests of shared memory regions that callers register: per caller, bounded, and safe against changes by the owner."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from weightd_gateway.auth import Caller
from weightd_gateway.system_shared_memory import MAX_REGIONS_PER_CALLER, RegisteredRegions
from weightd_protocol.errors import InvalidArgument, NotFound, ResourceExhausted

ANN = Caller("a", "ann")
BEN = Caller("b", "ben")


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    (tmp_path / "input").write_bytes(bytes(range(100)))
    return tmp_path


@pytest.fixture
def regions(shm: Path) -> RegisteredRegions:
    return RegisteredRegions(enabled=True, directory=shm)


def open_descriptors(directory: Path) -> int:
    """Return the number of descriptors of the directory and of its files in this process."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The descriptor of the listing itself is closed meanwhile.
            targets.append(descriptor.readlink())
    return sum(target == directory or directory in target.parents for target in targets)


def test_caller_reads_and_writes_its_region(shm: Path, regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "/input", 10, 50)
    assert regions.status(ANN) == [{"name": "in", "key": "/input", "offset": 10, "byte_size": 50}]
    region, offset, nbytes = regions.resolve(ANN, "in", 5, 3)
    into = bytearray(nbytes)
    region.read(offset, memoryview(into))
    assert into == bytes([15, 16, 17])
    region.write(offset, memoryview(b"abc"))
    assert (shm / "input").read_bytes()[14:19] == b"\x0eabc\x12"


def test_callers_do_not_see_other_regions(regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 0, 100)
    regions.register(BEN, "in", "input", 0, 1)
    assert regions.status(BEN, "in")[0]["byte_size"] == 1
    regions.unregister(BEN)
    assert regions.status(BEN) == []
    assert len(regions.status(ANN)) == 1
    for name in ("in", "none"):
        with pytest.raises(NotFound, match=f"no region {name} is registered by this caller"):
            regions.resolve(BEN, name, 0, 1)


def test_unregisters_one_or_all_regions(regions: RegisteredRegions) -> None:
    for name in "abc":
        regions.register(ANN, name, "input", 0, 1)
    regions.unregister(ANN, "b")
    regions.unregister(ANN, "b")
    assert [each["name"] for each in regions.status(ANN)] == ["a", "c"]
    regions.unregister(ANN)
    assert regions.status(ANN) == []


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "problem"),
    [
        ("../input", 0, 1, "expected the name of a file"),
        ("/a/b", 0, 1, "expected the name of a file"),
        ("..", 0, 1, "expected the name of a file"),
        ("in\0put", 0, 1, "expected the name of a file"),
        ("sem.input", 0, 1, "expected the name of a file"),
        ("", 0, 1, "expected the name of a file"),
        (7, 0, 1, "expected the name of a file"),
        ("none", 0, 1, "expected a file that belongs to the gateway's user"),
        ("link", 0, 1, "expected a file that belongs to the gateway's user"),
        ("pipe", 0, 1, "expected a file that belongs to the gateway's user"),
        ("directory", 0, 1, "expected a file that belongs to the gateway's user"),
        ("input", 0, 101, "byte_size: expected 1 to 100 from 0 on, got 101"),
        ("input", 100, 1, "byte_size: expected 1 to 0 from 100 on"),
        ("input", 0, 0, "byte_size: expected 1 to 100"),
        ("input", -1, 1, "offset: expected integer"),
        ("input", 0, 2**63, "byte_size: expected integer"),
        ("input", True, 1, "offset: expected integer"),
    ],
)
def test_rejects_invalid_region(
    shm: Path, regions: RegisteredRegions, key: object, offset: object, nbytes: object, problem: str
) -> None:
    (shm / "link").symlink_to(shm / "input")
    (shm / "directory").mkdir()
    os.mkfifo(shm / "pipe")
    descriptors = open_descriptors(shm)
    with pytest.raises(InvalidArgument, match=problem):
        regions.register(ANN, "in", key, offset, nbytes)
    assert regions.status(ANN) == []
    assert open_descriptors(shm) == descriptors


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another's file")
def test_rejects_file_of_another_user(shm: Path, regions: RegisteredRegions) -> None:
    os.chown(shm / "input", 1000, 1000)
    with pytest.raises(InvalidArgument, match="expected a file that belongs to the gateway's user"):
        regions.register(ANN, "in", "input", 0, 1)


def test_tensor_lies_within_region(regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 90, 10)
    regions.resolve(ANN, "in", 9, 1)
    regions.resolve(ANN, "in", 10, 0)
    for offset, nbytes in ((9, 2), (2**62, 2**62), (-1, 1), (0, "1"), (0, True)):
        with pytest.raises(InvalidArgument):
            regions.resolve(ANN, "in", offset, nbytes)


def test_truncated_file_is_an_error(shm: Path, regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 0, 100)
    region = regions.resolve(ANN, "in", 0, 100).region
    os.truncate(shm / "input", 10)
    with pytest.raises(InvalidArgument, match="file of the region has been truncated"):
        region.read(0, memoryview(bytearray(100)))
    with pytest.raises(InvalidArgument, match="file of the region has been truncated"):
        region.write(0, memoryview(bytes(100)))
    assert (shm / "input").stat().st_size == 10


def test_used_region_outlives_unregistration(shm: Path, regions: RegisteredRegions) -> None:
    descriptors = open_descriptors(shm)
    regions.register(ANN, "in", "input", 0, 100)
    place = regions.resolve(ANN, "in", 0, 100)
    regions.unregister(ANN)
    place.region.write(0, memoryview(b"x"))
    assert open_descriptors(shm) == descriptors + 1
    del place
    assert open_descriptors(shm) == descriptors


def test_limits_regions_and_rejects_duplicate_names(regions: RegisteredRegions) -> None:
    for index in range(MAX_REGIONS_PER_CALLER):
        regions.register(ANN, str(index), "input", 0, 1)
    with pytest.raises(ResourceExhausted):
        regions.register(ANN, "more", "input", 0, 1)
    regions.register(BEN, "0", "input", 0, 1)
    with pytest.raises(InvalidArgument, match="region 0 is registered already"):
        regions.register(BEN, "0", "input", 0, 1)
    with pytest.raises(InvalidArgument, match="expected a name of 1 to 256 bytes"):
        regions.register(BEN, "x" * 257, "input", 0, 1)


def test_disabled_shared_memory(shm: Path) -> None:
    regions = RegisteredRegions(enabled=False, directory=shm)
    for ask in (
        lambda: regions.register(ANN, "in", "input", 0, 1),
        lambda: regions.unregister(ANN),
        lambda: regions.status(ANN),
        lambda: regions.resolve(ANN, "in", 0, 1),
    ):
        with pytest.raises(InvalidArgument, match="shared memory is disabled"):
            ask()
