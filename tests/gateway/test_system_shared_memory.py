"""Files of /dev/shm that callers name: each its own, within bounds, and nothing that the owner does to one kills."""

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
    """Count this process's descriptors of the directory and of what is in it."""
    targets = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets.append(descriptor.readlink())
    return sum(target == directory or directory in target.parents for target in targets)


def test_what_a_caller_registers_it_can_read_and_write(shm: Path, regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "/input", 10, 50)
    assert regions.status(ANN) == [{"name": "in", "key": "/input", "offset": 10, "byte_size": 50}]
    region, offset, nbytes = regions.resolve(ANN, "in", 5, 3)
    into = bytearray(nbytes)
    region.read(offset, memoryview(into))
    assert into == bytes([15, 16, 17])
    region.write(offset, memoryview(b"abc"))
    assert (shm / "input").read_bytes()[14:19] == b"\x0eabc\x12"


def test_nobody_finds_another_s(regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 0, 100)
    regions.register(BEN, "in", "input", 0, 1)
    assert regions.status(BEN, "in")[0]["byte_size"] == 1
    regions.unregister(BEN)
    assert regions.status(BEN) == []
    assert len(regions.status(ANN)) == 1
    for name in ("in", "none"):
        with pytest.raises(NotFound, match=f"no region {name} is registered by this caller"):
            regions.resolve(BEN, name, 0, 1)


def test_one_of_several_is_unregistered_or_all(regions: RegisteredRegions) -> None:
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
def test_what_cannot_be_registered(
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
def test_a_file_of_another_user_is_none(shm: Path, regions: RegisteredRegions) -> None:
    os.chown(shm / "input", 1000, 1000)
    with pytest.raises(InvalidArgument, match="expected a file that belongs to the gateway's user"):
        regions.register(ANN, "in", "input", 0, 1)


def test_a_tensor_is_within_its_region(regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 90, 10)
    regions.resolve(ANN, "in", 9, 1)
    regions.resolve(ANN, "in", 10, 0)
    for offset, nbytes in ((9, 2), (2**62, 2**62), (-1, 1), (0, "1"), (0, True)):
        with pytest.raises(InvalidArgument):
            regions.resolve(ANN, "in", offset, nbytes)


def test_who_cuts_a_file_short_gets_an_error(shm: Path, regions: RegisteredRegions) -> None:
    regions.register(ANN, "in", "input", 0, 100)
    region = regions.resolve(ANN, "in", 0, 100).region
    os.truncate(shm / "input", 10)
    with pytest.raises(InvalidArgument, match="file of the region has been truncated"):
        region.read(0, memoryview(bytearray(100)))
    with pytest.raises(InvalidArgument, match="file of the region has been truncated"):
        region.write(0, memoryview(bytes(100)))
    assert (shm / "input").stat().st_size == 10


def test_a_region_that_is_in_use_stays_until_it_is_not(shm: Path, regions: RegisteredRegions) -> None:
    descriptors = open_descriptors(shm)
    regions.register(ANN, "in", "input", 0, 100)
    place = regions.resolve(ANN, "in", 0, 100)
    regions.unregister(ANN)
    place.region.write(0, memoryview(b"x"))
    assert open_descriptors(shm) == descriptors + 1
    del place
    assert open_descriptors(shm) == descriptors


def test_a_caller_has_so_many_and_no_two_of_a_name(regions: RegisteredRegions) -> None:
    for index in range(MAX_REGIONS_PER_CALLER):
        regions.register(ANN, str(index), "input", 0, 1)
    with pytest.raises(ResourceExhausted):
        regions.register(ANN, "more", "input", 0, 1)
    regions.register(BEN, "0", "input", 0, 1)
    with pytest.raises(InvalidArgument, match="region 0 is registered already"):
        regions.register(BEN, "0", "input", 0, 1)
    with pytest.raises(InvalidArgument, match="expected a name of 1 to 256 bytes"):
        regions.register(BEN, "x" * 257, "input", 0, 1)


def test_where_it_is_off_nobody_has_any(shm: Path) -> None:
    regions = RegisteredRegions(enabled=False, directory=shm)
    for ask in (
        lambda: regions.register(ANN, "in", "input", 0, 1),
        lambda: regions.unregister(ANN),
        lambda: regions.status(ANN),
        lambda: regions.resolve(ANN, "in", 0, 1),
    ):
        with pytest.raises(InvalidArgument, match="shared memory is disabled"):
            ask()
