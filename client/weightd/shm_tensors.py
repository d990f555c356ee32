"""Tensors of a client's requests in shared memory: allocation, registration with the daemon, release. No I/O.

A region must be registered with the daemon before a request can use it. A request does not wait for that: a tensor
whose region is not registered yet is sent in a frame.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from weightd.shm_arena import Block, MemfdRegion, ShmArena
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import InferResponse, RequestDescription, ResponseDescription
from weightd_protocol.messages.regions import Register, Unregister
from weightd_protocol.tensors import from_frame, from_memory

# Minimum size of a tensor in shared memory. Smaller tensors are sent in frames, which is faster.
MIN_SHARED_BYTES = 64 * 1024

# Maximum number of request descriptions whose output sizes are remembered. The oldest one is dropped first.
_MAX_REMEMBERED = 256

_EMPTY: Dict[Any, Any] = {}

RegionMessage = Union[Register, Unregister]


class WrongOut(InvalidArgument):
    """The dtype or the shape of an array in `out` does not match the output."""


# Location of an input: its position in the request, its region's id and its offset. The location of an output buffer
# also has the buffer's size.
SharedInput = Tuple[int, str, int]
SharedOutput = Tuple[int, str, int, int]


class UserBuffer:
    """A caller's array in a region, used as an output buffer. It has the same attributes as `Block`."""

    __slots__ = ("_array", "nbytes", "offset", "region")

    def __init__(self, array: Any, region: MemfdRegion, offset: int) -> None:
        self._array = array
        self.region = region
        self.offset = offset
        self.nbytes: int = array.nbytes

    def array(self, shape: Tuple[int, ...], dtype: Any) -> Any:
        """Return an array of `shape` and `dtype` that begins at the start of the buffer."""
        return np.ndarray(shape, dtype, self._array)


class Lease(NamedTuple):
    """The tensors of one request. The lease keeps their memory alive while the request is in progress.

    Attributes:
        epoch: the number of the connection for which the lease was made.
        arrays: the inputs as the caller gave them.
        out: the caller's arrays for outputs, by output name.
        framed_inputs: the inputs that are sent in frames, not in shared memory.
        shared_inputs: the locations of the inputs that are in shared memory.
        copies: the blocks of shared memory into which the client copied inputs.
        output_buffers: the buffers for outputs in shared memory, by the position of the output in the response.
        shared_outputs: the locations of the output buffers, in the form in which the request contains them.
    """

    epoch: int
    arrays: Sequence[Any]
    out: Mapping[str, Any]
    framed_inputs: List[Any]
    shared_inputs: List[SharedInput]
    copies: List[Block]
    output_buffers: Dict[int, Union[Block, UserBuffer]]
    shared_outputs: List[SharedOutput]


class ShmTensors:
    """Tensors of one client in shared memory.

    Several threads may use the object. Only one thread at a time may process messages of the daemon, and only one at a
    time may call `take_region_messages`.

    Args:
        next_id: returns a new id for a message.

    Attributes:
        arena: the client's regions, in which tensors are allocated.
        announced_regions: the value of `arena.regions` for which `take_region_messages` last created messages; None if
            `take_region_messages` must be called before each request.
        leases: the leases whose memory workers may use, by request id. The request has not ended, or a worker may still
            write to its output buffers.
        large_outputs: the large outputs of earlier requests, by the id() of the request's description. A value contains
            this description, because its id() is valid only as long as the object exists; the description of the
            response; and position, name and size in bytes of each large output.
    """

    def __init__(self, next_id: Callable[[], str]) -> None:
        self.arena = ShmArena()
        self.announced_regions: Optional[Tuple[MemfdRegion, ...]] = ()
        self.leases: Dict[str, Lease] = {}
        self.large_outputs: Dict[
            int, Tuple[RequestDescription, ResponseDescription, Sequence[Tuple[int, str, int]]]
        ] = {}
        self._next_id = next_id
        self._lock = threading.Lock()
        # Changes with each connection.
        self._epoch = 0
        # Whether regions can be registered on the current connection.
        self._can_share = False
        # The ids that the daemon has assigned to regions.
        self._region_ids: Dict[MemfdRegion, str] = {}
        self._registering: Dict[str, MemfdRegion] = {}
        self._refused_regions: Set[MemfdRegion] = set()

    # --- the connection -----------------------------------------------------------------------------------------

    def on_connected(self, *, can_share: bool) -> None:
        """Forget the regions of the last connection: on a new connection no region is registered."""
        self.on_disconnected()
        self._can_share = can_share

    def on_disconnected(self) -> None:
        """Drop all leases and retire their regions: no message will report when workers stop writing to them."""
        self._can_share = False
        self._epoch += 1
        with self._lock:
            for known in (self._region_ids, self._registering, self._refused_regions):
                known.clear()
            self.announced_regions = ()
            leases, self.leases = self.leases, {}
        self.arena.retire(
            tuple({buffer.region for lease in leases.values() for buffer in lease.output_buffers.values()})
        )

    def take_region_messages(self) -> Sequence[Tuple[RegionMessage, Optional[MemfdRegion]]]:
        """Return the messages that register or unregister regions. They must be sent before the next request.

        Each message comes with the region whose descriptor must accompany it, or None. The result is empty if
        `announced_regions` is `arena.regions`.
        """
        regions = self.arena.regions
        if not self._can_share or regions is self.announced_regions:
            return ()
        messages: List[Tuple[RegionMessage, Optional[MemfdRegion]]] = []
        with self._lock:
            retired = [region for region in self._region_ids if region not in regions]
            unused = [region for region in retired if region.is_unused]
            messages += [(Unregister(self._next_id(), self._region_ids.pop(region)), None) for region in unused]
            for region in regions:
                if not (
                    region in self._region_ids
                    or region in self._refused_regions
                    or region in self._registering.values()
                ):
                    register = Register(self._next_id())
                    self._registering[register.id] = region
                    messages.append((register, region))
            self._refused_regions.intersection_update(regions)
            # A retired region cannot be unregistered while a block of it is in use here, because a request may be about
            # to name it. None makes the next request check again.
            self.announced_regions = None if len(unused) < len(retired) else regions
        return messages

    def on_registered(self, request_id: str, region_id: str) -> None:
        """Store the id that the daemon has assigned to a region."""
        with self._lock:
            region = self._registering.pop(request_id, None)
            if region is not None:
                self._region_ids[region] = region_id

    def on_refused(self, request_id: str) -> bool:
        """Return whether the failed message was the registration of a region.

        If so, the client never registers this region again.
        """
        with self._lock:
            region = self._registering.pop(request_id, None)
            if region is not None:
                self._refused_regions.add(region)
        return region is not None

    # --- requests -----------------------------------------------------------------------------------------------

    def new_lease(self, description: RequestDescription, arrays: Sequence[Any], out: Mapping[str, Any]) -> Lease:
        """Allocate shared memory for the inputs and large outputs of a request, and return the lease."""
        lease = Lease(self._epoch, arrays, out, [], [], [], {}, [])
        if not self._can_share:
            lease.framed_inputs.extend(arrays)
            return lease
        for index, nbytes in enumerate(description.sizes):
            array = arrays[index]
            if nbytes < MIN_SHARED_BYTES or not self._share_input(lease, index, array, nbytes):
                lease.framed_inputs.append(array)
        large = self.large_outputs.get(id(description))
        if large is not None:
            for index, name, nbytes in large[2]:
                buffer = self._output_buffer(nbytes, out.get(name))
                known_as = None if buffer is None else self._region_ids.get(buffer.region)
                if buffer is not None and known_as is not None:
                    lease.output_buffers[index] = buffer
                    lease.shared_outputs.append((index, known_as, buffer.offset, buffer.nbytes))
        return lease

    def is_stale(self, lease: Lease) -> bool:
        """Return whether the connection for which the lease was made is lost."""
        return lease.epoch != self._epoch

    def activate(self, request_id: str, lease: Lease) -> bool:
        """Keep the lease until the request ends. Return False if the connection of the lease is lost."""
        if lease.epoch != self._epoch:
            return False
        if lease.shared_inputs or lease.output_buffers:
            self.leases[request_id] = lease
        return True

    def release(self, request_id: str, *, running: bool = False) -> None:
        """Release the shared memory of a request that has ended, unless a worker is still `running` the request."""
        if not running:
            self.leases.pop(request_id, None)

    def read_outputs(
        self, request: RequestDescription, lease: Optional[Lease], response: InferResponse, frames: Sequence[Any]
    ) -> Dict[str, Any]:
        """Return the outputs of a request by name. `frames` contains only the outputs that are not in shared memory.

        Raises:
            InvalidArgument: an output does not match its description, or the array given for it in `out`.
        """
        description = response.description
        if description.largest >= MIN_SHARED_BYTES:
            remembered = self.large_outputs.get(id(request))
            if remembered is None or remembered[1] is not description:
                self._remember_outputs(request, description)
        outputs: Dict[str, Any] = {}
        shared_positions, remaining_frames = response.shared_outputs or (), iter(frames)
        buffers, out = (_EMPTY, _EMPTY) if lease is None else (lease.output_buffers, lease.out)
        for index, spec in enumerate(description.outputs):
            name = spec.name
            if index not in shared_positions:
                array = from_frame(spec, next(remaining_frames))
            elif index not in buffers or buffers[index].nbytes < description.sizes[index]:
                raise InvalidArgument("an output is in memory that the request did not offer")
            else:
                array = from_memory(spec, buffers[index].array)
                if response.may_still_write:
                    array = array.copy()
                array.flags.writeable = False
            outputs[name] = _fill_output(name, out[name], array) if name in out else array
        return outputs

    # --- within -------------------------------------------------------------------------------------------------

    def _share_input(self, lease: Lease, index: int, array: Any, nbytes: int) -> bool:
        """Put an input into shared memory. Return False if that is impossible, so the input must be sent in a frame.

        An input that lies in a region stays where it is; any other input is copied to a new block.
        """
        # An array that owns its memory (`base` is None) is in no region, so no search is needed.
        found = None if array.base is None else self.arena.find(array)
        if found is not None:
            region, offset = found
            region_id = self._region_ids.get(region)
            if region_id is None:
                return False
        else:
            block = self.arena.take(nbytes)
            region_id = None if block is None else self._region_ids.get(block.region)
            if block is None or region_id is None:
                return False
            offset = block.offset
            block.region.write(offset, array)
            lease.copies.append(block)
        lease.shared_inputs.append((index, region_id, offset))
        return True

    def _output_buffer(self, nbytes: int, user_array: Any) -> Optional[Union[Block, UserBuffer]]:
        """Return a buffer for an output: `user_array` itself if it lies in a region, otherwise a new block."""
        found = None if user_array is None or not user_array.flags.c_contiguous else self.arena.find(user_array)
        buffer = self.arena.take(nbytes) if found is None else UserBuffer(user_array, *found)
        if buffer is not None and buffer.nbytes:
            buffer.region.populate(buffer.offset, buffer.nbytes)
        return buffer

    def _remember_outputs(self, request: RequestDescription, response: ResponseDescription) -> None:
        large = [
            (index, spec.name, nbytes)
            for index, (spec, nbytes) in enumerate(zip(response.outputs, response.sizes))
            if nbytes >= MIN_SHARED_BYTES
        ]
        with self._lock:
            if id(request) not in self.large_outputs and len(self.large_outputs) >= _MAX_REMEMBERED:
                del self.large_outputs[next(iter(self.large_outputs))]
            self.large_outputs[id(request)] = request, response, large


def _fill_output(name: str, user_array: Any, array: Any) -> Any:
    """Copy an output to the caller's array, unless the worker wrote it there already, and return the caller's array."""
    if user_array.dtype != array.dtype or user_array.shape != array.shape:
        expected = f"expected an array of {array.dtype} and shape {list(array.shape)}"
        raise WrongOut(f"out: {name}: {expected}, got {user_array.dtype} and {list(user_array.shape)}")
    if user_array.__array_interface__["data"][0] != array.__array_interface__["data"][0]:
        np.copyto(user_array, array)
    return user_array
