"""Tests of the registry of shared memory regions: ownership, limits and the tensors of a request."""

from __future__ import annotations

import gc
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common import memfd
from weightd_daemon.api.region_registry import MAX_USER_REGIONS, RegionRegistry
from weightd_daemon.scheduling.tensor_location import TensorLocations
from weightd_daemon.tenants.usage import QuotaExceeded
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, NotFound, RequestError, ResourceExhausted
from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions

FOUR_FLOATS = (TensorSpec("x", "FP32", (2, 2)),)


def user(client: bytes) -> str:
    return client[:1].decode()


def ignore_closed() -> None:
    pass


@pytest.fixture
def registry() -> RegionRegistry:
    return RegionRegistry(10_000, user, ignore_closed)


def locate(
    registry: RegionRegistry, client: bytes, region: str, offset: int, room: int | None = None
) -> TensorLocations:
    outputs = () if room is None else (OutputLocation(0, region, offset, room),)
    inputs = (InputLocation(0, region, offset),) if room is None else ()
    return registry.locate(client, Regions(inputs, outputs), FOUR_FLOATS)


def open_descriptors(registry: RegionRegistry) -> int:
    gc.collect()
    while registry.closed_regions:
        os.close(registry.closed_regions.pop()[2])
    return len([*Path("/proc/self/fd").iterdir()])


def test_region_has_random_name_and_one_connection(registry: RegionRegistry) -> None:
    first = registry.register(b"a1", deque([memfd.create(100)]))
    second = registry.register(b"a2", deque([memfd.create(100)]))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second
    assert locate(registry, b"a1", first, 0).inputs[0].nbytes == 16
    for client, region in ((b"a1", second), (b"b1", first), (b"a1", "0" * 32)):
        with pytest.raises(NotFound) as refusal:
            locate(registry, client, region, 0)
        assert str(refusal.value) == "parameters.regions.inputs[0].region: this connection has no such region"


def test_tenant_limit_replaces_limit_of_daemon() -> None:
    registry = RegionRegistry(100, user, ignore_closed)
    with pytest.raises(ResourceExhausted, match="max_shm_bytes"):
        registry.register(b"a1", deque([memfd.create(101)]))
    region = registry.register(b"a1", deque([memfd.create(150)]), 200)
    with pytest.raises(QuotaExceeded, match="already has 150 bytes in regions, and max_shared_bytes is 200") as error:
        registry.register(b"a2", deque([memfd.create(51)]), 200)
    assert error.value.quota == "max_shared_bytes"
    registry.register(b"a2", deque([memfd.create(50)]), 200)
    registry.register(b"b1", deque([memfd.create(100)]))
    registry.unregister(b"a1", region)
    registry.register(b"a1", deque([memfd.create(150)]), 200)


@given(offset=st.integers(0, 200) | st.integers(0, limits.MAX_COUNT), room=st.integers(0, 200))
def test_tensor_must_lie_within_region(offset: int, room: int) -> None:
    registry = RegionRegistry(10_000, user, ignore_closed)
    region = registry.register(b"a1", deque([memfd.create(100)]))
    for nbytes, size in ((16, None), (room, room)):
        if offset + nbytes <= 100:
            locate(registry, b"a1", region, offset, size)
        else:
            with pytest.raises(InvalidArgument, match=r"offset: expected an end within .* at most 100, got \d+"):
                locate(registry, b"a1", region, offset, size)


@pytest.mark.parametrize(
    ("descriptors", "why"), [(0, "one descriptor, got 0"), (2, "one descriptor, got 2"), (1, "a memfd, got")]
)
def test_invalid_registration_keeps_descriptors(registry: RegionRegistry, descriptors: int, why: str) -> None:
    given = deque([0] * descriptors)
    with pytest.raises(InvalidArgument, match=f"register: expected {why}"):
        registry.register(b"a1", given)
    assert len(given) == descriptors


def register_too_many(registry: RegionRegistry) -> None:
    for _ in range(limits.MAX_REGIONS + 1):
        registry.register(b"a1", deque([memfd.create(1)]))


def register_on_many_connections(registry: RegionRegistry) -> None:
    for index in range(MAX_USER_REGIONS + 1):
        registry.register(b"a%d" % (index // limits.MAX_REGIONS), deque([memfd.create(1)]))


def register_too_large(registry: RegionRegistry) -> None:
    registry.register(b"a1", deque([memfd.create(6_000)]))
    registry.register(b"a2", deque([memfd.create(4_001)]))


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (register_too_many, "connection already has 16 regions"),
        (register_on_many_connections, "user already has 256 regions"),
        (register_too_large, "user already has 6000 bytes in regions; the limit is 10000"),
    ],
)
def test_limits_regions_of_connection_and_user(
    registry: RegionRegistry, fill: Callable[[RegionRegistry], None], why: str
) -> None:
    with pytest.raises(ResourceExhausted, match=why):
        fill(registry)
    registry.register(b"b1", deque([memfd.create(10_000)]))


def test_limits_regions_of_all_clients(registry: RegionRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightd_daemon.api.region_registry.max_total_regions", lambda: 2)
    registry.register(b"a1", deque([memfd.create(1)]))
    second = registry.register(b"b1", deque([memfd.create(1)]))
    with pytest.raises(ResourceExhausted, match="together already have 2 regions"):
        registry.register(b"c1", deque([memfd.create(1)]))
    registry.unregister(b"b1", second)
    registry.register(b"c1", deque([memfd.create(1)]))


def test_register_unregister_leaks_no_descriptors(registry: RegionRegistry) -> None:
    registry.register(b"a1", deque([memfd.create(1_000)]))
    before = open_descriptors(registry)
    for _ in range(1000):
        region = registry.register(b"a1", deque([memfd.create(9_000)]))
        registry.unregister(b"a1", region)
        registry.unregister(b"a1", region)
    assert open_descriptors(registry) == before


@pytest.mark.parametrize("client_disconnects", [True, False])
def test_region_lives_until_last_request_releases_it(registry: RegionRegistry, *, client_disconnects: bool) -> None:
    before = open_descriptors(registry)
    region = registry.register(b"a1", deque([memfd.create(9_000)]))
    named = locate(registry, b"a1", region, 0)
    if client_disconnects:
        registry.remove_client(b"a1")
    else:
        registry.unregister(b"a1", region)
    with pytest.raises(NotFound):
        locate(registry, b"a1", region, 0)
    other = deque([memfd.create(9_000)])
    with pytest.raises(RequestError, match="9000 bytes"):
        registry.register(b"a2", other)
    [memory] = named.regions
    assert os.fstat(memory.fileno()).st_size == 9_000
    number = memory.number
    assert registry.closed_regions == []
    del named, memory
    assert [each for each, _, _ in registry.closed_regions] == [number]
    registry.register(b"a2", other)
    assert open_descriptors(registry) == before + 1


def test_free_closed_does_not_block(registry: RegionRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, closed = threading.Event(), queue.SimpleQueue[int]()

    def close(descriptor: int) -> None:
        hangs.wait(10)
        closed.put(descriptor)

    monkeypatch.setattr("weightd_daemon.platform.fd_closer.os.close", close)
    descriptor = memfd.create(9_000)
    registry.unregister(b"a1", registry.register(b"a1", deque([descriptor])))
    assert len(registry.free_closed()) == 1
    assert registry.free_closed() == []
    assert closed.empty()
    hangs.set()
    assert closed.get(timeout=10) == descriptor
    monkeypatch.undo()
    os.close(descriptor)


def test_locate_caches_locations_until_unregister(registry: RegionRegistry) -> None:
    region = registry.register(b"a1", deque([memfd.create(100)]))
    regions = Regions((InputLocation(0, region, 0),))
    assert registry.locate(b"a1", regions, FOUR_FLOATS) is registry.locate(b"a1", regions, FOUR_FLOATS)
    with pytest.raises(NotFound):
        registry.locate(b"a2", regions, FOUR_FLOATS)
    registry.unregister(b"a1", region)
    assert len(registry.free_closed()) == 1
    with pytest.raises(NotFound):
        registry.locate(b"a1", regions, FOUR_FLOATS)
