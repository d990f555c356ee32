"""The memory that clients have registered, and what of it their requests may name."""

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

# Of one client: places that are in use at a time.
_MAX_CACHED_LOCATIONS = 64

# Of one user, on all connections: each costs a descriptor.
MAX_USER_REGIONS = 16 * limits.MAX_REGIONS


class RegionRegistry:
    """Regions by the client that has registered them: nobody else can name one, whatever it guesses.

    Args:
        max_bytes: of all regions of one user, where no other bound is told for it.
        user_of: called with a client; returns on whose account it goes.
        on_closed: called when there is something to `free_closed`: from anywhere, so it must not wait or take a lock.

    Attributes:
        closed_regions: numbers, users and descriptors of regions that nothing names any more, until `free_closed`.
    """

    def __init__(self, max_bytes: int, user_of: Callable[[bytes], str], on_closed: Callable[[], object]) -> None:
        self.closed_regions: list[tuple[int, str, int]] = []
        self._fd_closer = DescriptorCloser(log_resource_error)
        self._max_bytes = max_bytes
        self._user_of = user_of
        self._on_closed = on_closed
        self._by_client: dict[bytes, dict[str, SharedRegion]] = {}
        # What was found for requests of a client: by the identity of what they say, with that so that it stays its own.
        self._cached_locations: dict[bytes, dict[tuple[int, int], tuple[object, object, TensorLocations]]] = {}
        # Of regions that are open: those that were given up, too, while a request names them.
        self._bytes_by_user = Counter[str]()
        self._count_by_user = Counter[str]()
        # A worker may still have one of the daemon before this one: no number is used twice.
        self._region_numbers = itertools.count(time.time_ns() // 1000)

    def register(self, client: bytes, descriptors: deque[int], max_tenant_bytes: int = 0) -> str:
        """Take the memory that came with a client's message; return the name of the region.

        `max_tenant_bytes` is the bound of its tenant for all that it has, 0 for none.

        Raises:
            InvalidArgument: what came cannot be shared so; it is left where it is.
            ResourceExhausted: the client, or its user, has as much as it may.
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
        """Give up a region, if there is such a one; requests that name it already are not concerned."""
        self._cached_locations.pop(client, None)
        self._by_client.get(client, {}).pop(region, None)

    def remove_client(self, client: bytes) -> None:
        """The client is gone: give up its regions."""
        self._cached_locations.pop(client, None)
        self._by_client.pop(client, None)

    def locate(self, client: bytes, regions: Regions, inputs: Sequence[TensorSpec]) -> TensorLocations:
        """Return where a request's tensors are, once it is sure that they lie in regions of that client.

        Raises:
            InvalidArgument: they do not.
            NotFound: a region is none of this connection.
        """
        try:
            # The decoder gives equal bytes the same objects.
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
        """Return the numbers of those that are closed, once, and free their memory: seconds of work if it was large."""
        closed, self.closed_regions = self.closed_regions, []
        for _, user, descriptor in closed:
            self._fd_closer.close(user, descriptor)
        return [number for number, _, _ in closed]

    def _check_count(self, client: bytes, user: str) -> None:
        if len(self._by_client.get(client, ())) >= limits.MAX_REGIONS:
            raise ResourceExhausted(f"this connection has {limits.MAX_REGIONS} regions already")
        if self._count_by_user[user] >= MAX_USER_REGIONS:
            raise ResourceExhausted(f"this user has {MAX_USER_REGIONS} regions already")
        if sum(self._count_by_user.values()) >= max_total_regions():
            raise ResourceExhausted(f"all clients together have {max_total_regions()} regions already (LimitNOFILE=)")

    def _check_bytes(self, user: str, nbytes: int, max_tenant_bytes: int) -> None:
        if max_tenant_bytes and self._bytes_by_user[user] + nbytes > max_tenant_bytes:
            text = (
                f"this tenant has {self._bytes_by_user[user]} bytes in regions already, max_shared_bytes is"
                f" {max_tenant_bytes}"
            )
            raise QuotaExceeded("max_shared_bytes", text)
        if not max_tenant_bytes and self._bytes_by_user[user] + nbytes > self._max_bytes:
            bound = f"the bound is {self._max_bytes} (max_shm_bytes)"
            raise ResourceExhausted(f"this user has {self._bytes_by_user[user]} bytes in regions already; {bound}")

    def _on_region_unused(self, user: str, nbytes: int, number: int, descriptor: int) -> None:
        # That may be anywhere. Nothing here waits, or takes a lock.
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
        # Not which: it may be another's.
        raise NotFound(f"parameters.regions.{where}.region: this connection has no such region")
    # Numbers here have no end: no sum is too large.
    end = requested.offset + nbytes
    if end > shared_region.nbytes:
        expected = f"expected an end within the region, at most {shared_region.nbytes}, got {end}"
        raise InvalidArgument(f"parameters.regions.{where}.offset: {expected}")
    return TensorLocation(shared_region, requested.offset, nbytes)
