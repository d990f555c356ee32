"""Registry of the shared memory regions of clients, and lookup of tensors in the regions."""

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

# Maximum number of cached results of `RegionRegistry.locate` for each client.
_MAX_CACHED_LOCATIONS = 64

# Maximum number of regions of one user on all connections together. Each region needs a file descriptor.
MAX_USER_REGIONS = 16 * limits.MAX_REGIONS


class RegionRegistry:
    """Registry of shared memory regions. Only the client that has registered a region can use it.

    Args:
        max_bytes: the maximum number of bytes of all regions of one user. For a user with a tenant, `register` may set
            another limit.
        user_of: called with the key of a client; returns the user or tenant to which the client's regions count.
        on_closed: called when `closed_regions` has a new entry. It may be called from a finalizer at any time, so it
            must neither block nor acquire a lock.

    Attributes:
        closed_regions: number, user and descriptor of each region that no object refers to any more and that
            `free_closed` has not closed yet.
    """

    def __init__(self, max_bytes: int, user_of: Callable[[bytes], str], on_closed: Callable[[], object]) -> None:
        self.closed_regions: list[tuple[int, str, int]] = []
        self._fd_closer = DescriptorCloser(log_resource_error)
        self._max_bytes = max_bytes
        self._user_of = user_of
        self._on_closed = on_closed
        self._by_client: dict[bytes, dict[str, SharedRegion]] = {}
        # Cached results of `locate`, by client and by `id` of the arguments. The arguments are kept, too, so that no
        # other objects can get the same ids.
        self._cached_locations: dict[bytes, dict[tuple[int, int], tuple[object, object, TensorLocations]]] = {}
        # The bytes and the number of each user's regions, including unregistered regions that a request still uses.
        self._bytes_by_user = Counter[str]()
        self._count_by_user = Counter[str]()
        # Region numbers start at the time in microseconds, so that no region gets a number that a previous daemon has
        # given to another region: a worker may still have mapped a region of the previous daemon.
        self._region_numbers = itertools.count(time.time_ns() // 1000)

    def register(self, client: bytes, descriptors: deque[int], max_tenant_bytes: int = 0) -> str:
        """Register a region whose descriptor came with a client's message; return the name of the region.

        `max_tenant_bytes` is the maximum number of bytes of all regions of the client's tenant; 0 if the tenant has no
        separate limit.

        Raises:
            InvalidArgument: there is not exactly one descriptor, or its memory cannot be shared safely. The descriptors
                stay in `descriptors`.
            ResourceExhausted: the client, its user, its tenant or all clients together would have too many regions or
                bytes.
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
        """Remove a region, if it exists. Requests that already use the region are not affected."""
        self._cached_locations.pop(client, None)
        self._by_client.get(client, {}).pop(region, None)

    def remove_client(self, client: bytes) -> None:
        """Remove the regions of a client that has disconnected."""
        self._cached_locations.pop(client, None)
        self._by_client.pop(client, None)

    def locate(self, client: bytes, regions: Regions, inputs: Sequence[TensorSpec]) -> TensorLocations:
        """Return the locations of a request's tensors in shared memory, after checking that they are valid.

        Raises:
            InvalidArgument: a location exceeds its region, or an output is given twice.
            NotFound: the client has not registered a region with this name.
        """
        try:
            # The lookup by `id` works, because the decoder returns the same objects for equal bytes.
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
        """Have threads close the descriptors in `closed_regions`; return the numbers of these regions.

        Closing can take seconds, because the kernel frees the memory.
        """
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
        # A finalizer may call this at any time, so it must neither block nor acquire a lock.
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
        # The error does not contain the name of the region, because the region may belong to another client.
        raise NotFound(f"parameters.regions.{where}.region: this connection has no such region")
    # This sum is safe for any offset from a client, because Python integers do not overflow.
    end = requested.offset + nbytes
    if end > shared_region.nbytes:
        expected = f"expected an end within the region, at most {shared_region.nbytes}, got {end}"
        raise InvalidArgument(f"parameters.regions.{where}.offset: {expected}")
    return TensorLocation(shared_region, requested.offset, nbytes)
