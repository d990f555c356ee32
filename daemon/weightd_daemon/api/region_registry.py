"""The registry of shared memory regions, and the lookup of tensors in them."""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from weightd_common import memfd
from weightd_daemon.platform.connection_limiter import max_total_regions
from weightd_daemon.platform.fd_closer import DescriptorCloser
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.scheduling.tensor_location import SharedRegion, TensorLocation, TensorLocations
from weightd_daemon.tenants.usage import QuotaExceeded
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, NotFound, ResourceExhausted
from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions

# The maximum number of cached lookups for each client.
_MAX_CACHED_LOCATIONS = 64

# The maximum number of regions of one user on all connections; each needs a file descriptor.
MAX_USER_REGIONS = 16 * limits.MAX_REGIONS


class RegionRegistry:
    """Shared memory regions by the client that has registered them. No other client can use a region, even by its name.

    Args:
        max_bytes: the maximum size of one user's regions, unless `register` gets another limit.
        user_of: called with a client; returns the user or tenant on whose account it counts.
        on_closed: called when `free_closed` has something to do. The call may come from anywhere, even from a
            finalizer, so it must neither block nor take a lock.

    Attributes:
        closed_regions: numbers, users and descriptors of regions that no object refers to, until `free_closed`.
    """

    def __init__(self, max_bytes: int, user_of: Callable[[bytes], str], on_closed: Callable[[], object]) -> None:
        self.closed_regions: list[tuple[int, str, int]] = []
        self._fd_closer = DescriptorCloser(log_resource_error)
        self._max_bytes = max_bytes
        self._user_of = user_of
        self._on_closed = on_closed
        self._by_client: dict[bytes, dict[str, SharedRegion]] = {}
        # Results of `locate` by client and by the identity of its arguments, with the arguments, so that no other
        # objects get the same identities.
        self._cached_locations: dict[bytes, dict[tuple[int, int], tuple[object, object, TensorLocations]]] = {}
        # The counts include unregistered regions that a request still uses.
        self._bytes_by_user = Counter[str]()
        self._count_by_user = Counter[str]()
        # Numbers are never used twice: a worker may still have a region of a previous daemon.
        self._region_numbers = itertools.count(time.time_ns() // 1000)

    def register(self, client: bytes, descriptors: deque[int], max_tenant_bytes: int = 0) -> str:
        """Register the memory whose descriptor came with a client's message; return the name of the region.

        `max_tenant_bytes` is the limit for all regions of the client's tenant, 0 for none.

        Raises:
            InvalidArgument: the descriptor cannot be shared in this way; it stays in `descriptors`.
            ResourceExhausted: the client, its user or all clients together have as many regions or bytes as allowed.
        """
        if len(descriptors) != 1:
            raise InvalidArgument(f"register: expected one descriptor, got {len(descriptors)}")
        user, nbytes = self._user_of(client), _memfd_bytes(descriptors[0])
        self._check_count(client, user)
        self._check_bytes(user, nbytes, max_tenant_bytes)
        self._bytes_by_user[user] += nbytes
        self._count_by_user[user] += 1
        number = next(self._region_numbers)
        region = secrets.token_hex(limits.MAX_REGION_ID_BYTES // 2)
        shared_region = SharedRegion(
            number, descriptors.popleft(), nbytes, functools.partial(self._on_region_unused, user, nbytes, number)
        )
        self._by_client.setdefault(client, {})[region] = shared_region
        return region

    def unregister(self, client: bytes, region: str) -> None:
        """Remove a region, if it exists. Requests that use it already are not affected."""
        self._cached_locations.pop(client, None)
        self._by_client.get(client, {}).pop(region, None)

    def remove_client(self, client: bytes) -> None:
        """Remove the regions of a client that has disconnected."""
        self._cached_locations.pop(client, None)
        self._by_client.pop(client, None)

    def locate(self, client: bytes, regions: Regions, inputs: Sequence[TensorSpec]) -> TensorLocations:
        """Return the locations of a request's tensors, after checking that they lie in regions of the client.

        Raises:
            InvalidArgument: a location is invalid.
            NotFound: the connection has no such region.
        """
        try:
            # The decoder returns the same objects for equal bytes.
            return self._cached_locations[client][id(regions), id(inputs)][2]
        except KeyError:
            pass
        locations = self._locate(client, regions, inputs)
        cached = self._cached_locations.setdefault(client, {})
        if len(cached) >= _MAX_CACHED_LOCATIONS:
            cached.clear()
        cached[id(regions), id(inputs)] = regions, inputs, locations
        return locations

    def _locate(self, client: bytes, regions: Regions, inputs: Sequence[TensorSpec]) -> TensorLocations:
        client_regions = self._by_client.get(client, {})
        output_tensors = [each.tensor_index for each in regions.outputs]
        if len({*output_tensors}) < len(output_tensors):
            raise InvalidArgument(f"parameters.regions.outputs: a tensor is given twice in {output_tensors}")
        return TensorLocations(
            {
                each.tensor_index: _locate_tensor(
                    client_regions, each, inputs[each.tensor_index].nbytes, f"inputs[{index}]"
                )
                for index, each in enumerate(regions.inputs)
            },
            {
                each.tensor_index: _locate_tensor(client_regions, each, each.nbytes, f"outputs[{index}]")
                for index, each in enumerate(regions.outputs)
            },
        )

    def free_closed(self) -> Sequence[int]:
        """Close unused regions in other threads, which can take seconds, and return the numbers of the regions."""
        closed, self.closed_regions = self.closed_regions, []
        for _, user, descriptor in closed:
            self._fd_closer.close(user, descriptor)
        return [number for number, _, _ in closed]

    def _check_count(self, client: bytes, user: str) -> None:
        if len(self._by_client.get(client, ())) >= limits.MAX_REGIONS:
            raise ResourceExhausted(f"this connection already has {limits.MAX_REGIONS} regions")
        if self._count_by_user[user] >= MAX_USER_REGIONS:
            raise ResourceExhausted(f"this user already has {MAX_USER_REGIONS} regions")
        if sum(self._count_by_user.values()) >= max_total_regions():
            raise ResourceExhausted(f"all clients together already have {max_total_regions()} regions (LimitNOFILE=)")

    def _check_bytes(self, user: str, nbytes: int, max_tenant_bytes: int) -> None:
        if max_tenant_bytes and self._bytes_by_user[user] + nbytes > max_tenant_bytes:
            text = (
                f"this tenant already has {self._bytes_by_user[user]} bytes in regions, and max_shared_bytes is"
                f" {max_tenant_bytes}"
            )
            raise QuotaExceeded("max_shared_bytes", text)
        if not max_tenant_bytes and self._bytes_by_user[user] + nbytes > self._max_bytes:
            bound = f"the limit is {self._max_bytes} (max_shm_bytes)"
            raise ResourceExhausted(f"this user already has {self._bytes_by_user[user]} bytes in regions; {bound}")

    def _on_region_unused(self, user: str, nbytes: int, number: int, descriptor: int) -> None:
        # This may be called from anywhere, even from a finalizer, so it neither blocks nor takes a lock.
        self.closed_regions.append((number, user, descriptor))
        self._on_closed()
        self._bytes_by_user[user] -= nbytes
        self._count_by_user[user] -= 1
        if not self._count_by_user[user]:
            del self._count_by_user[user], self._bytes_by_user[user]


def _memfd_bytes(descriptor: int) -> int:
    try:
        return memfd.checked_size(descriptor)
    except memfd.NotShareable as error:
        raise InvalidArgument(f"register: {error}") from None


def _locate_tensor(
    client_regions: dict[str, SharedRegion], requested: InputLocation | OutputLocation, nbytes: int, where: str
) -> TensorLocation:
    shared_region = client_regions.get(requested.region)
    if shared_region is None:
        # The error does not name the region, which may belong to another client.
        raise NotFound(f"parameters.regions.{where}.region: this connection has no such region")
    # Python integers do not overflow.
    end = requested.offset + nbytes
    if end > shared_region.nbytes:
        expected = f"expected an end within the region, at most {shared_region.nbytes}, got {end}"
        raise InvalidArgument(f"parameters.regions.{where}.offset: {expected}")
    return TensorLocation(shared_region, requested.offset, nbytes)
