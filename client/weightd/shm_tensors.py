"""Which tensors of a client's requests are in memory that the daemon's workers see, and until when. Without a socket.

Nobody waits for that: a tensor is in such memory if its region is known to the daemon by then, and else in a frame, as
it is where memory cannot be shared at all.
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

# A smaller tensor costs less in a frame.
MIN_SHARED_BYTES = 64 * 1024

# Shapes whose outputs are remembered; those that came first go first.
_MAX_REMEMBERED = 256

_EMPTY: Dict[Any, Any] = {}

RegionMessage = Union[Register, Unregister]


class WrongOut(InvalidArgument):
    """An array that was given for an output is not what the output is."""


# Of an input: position, region and offset, as a request names them; of room for an output its bytes, too.
SharedInput = Tuple[int, str, int]
SharedOutput = Tuple[int, str, int, int]


class UserBuffer:
    """Room in an array that the caller has, as a `Block` is: the whole of it, which is in a region."""

    __slots__ = ("_array", "nbytes", "offset", "region")

    def __init__(self, array: Any, region: MemfdRegion, offset: int) -> None:
        self._array = array
        self.region = region
        self.offset = offset
        self.nbytes: int = array.nbytes

    def array(self, shape: Tuple[int, ...], dtype: Any) -> Any:
        """Return its first bytes as an array."""
        return np.ndarray(shape, dtype, self._array)


class Lease(NamedTuple):
    """The tensors of one request, which keep their memory as long as it is under way.

    Attributes:
        epoch: of the connection that it is for.
        arrays: the inputs, as the caller has them.
        out: arrays for outputs, by name.
        framed_inputs: inputs that are nowhere else.
        shared_inputs: those that are.
        copies: where these were copied to.
        output_buffers: for outputs, by their position.
        shared_outputs: the same, as the request names them.
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
    """The shared memory of one client.

    May be used by several threads: one at a time tells it what the daemon has said, or what is to be said.

    Args:
        next_id: gives the ids of messages.

    Attributes:
        arena: where the memory is from.
        announced_regions: the regions of which there is nothing to say; None where that may change at any time.
        leases: of requests that have not ended, or whose memory a worker may still write to, by id.
        large_outputs: of requests that are answered with large outputs, by the identity of their description: with
            itself, so that it stays its own, the description of the answer, and position, name and bytes of each large
            output.
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
        # Another one with each connection.
        self._epoch = 0
        # Whether regions may be registered on the present connection, and their names there.
        self._can_share = False
        self._region_ids: Dict[MemfdRegion, str] = {}
        self._registering: Dict[str, MemfdRegion] = {}
        self._refused_regions: Set[MemfdRegion] = set()

    # --- the connection -----------------------------------------------------------------------------------------

    def on_connected(self, *, can_share: bool) -> None:
        """There is another connection: on that nothing is registered yet."""
        self.on_disconnected()
        self._can_share = can_share

    def on_disconnected(self) -> None:
        """The connection is lost: nobody will tell when workers are done with what was under way."""
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
        """Return what is to be said before the next request, each with the region whose descriptor goes with it.

        Nothing, where the arena's regions are those that are `announced_regions`.
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
            # The name of one that was let go is still known: a request may be about to name it.
            self.announced_regions = None if len(unused) < len(retired) else regions
        return messages

    def on_registered(self, request_id: str, region_id: str) -> None:
        """The daemon knows a region."""
        with self._lock:
            region = self._registering.pop(request_id, None)
            if region is not None:
                self._region_ids[region] = region_id

    def on_refused(self, request_id: str) -> bool:
        """A message has ended in an error; return whether it was about a region. That one is not offered again."""
        with self._lock:
            region = self._registering.pop(request_id, None)
            if region is not None:
                self._refused_regions.add(region)
        return region is not None

    # --- requests -----------------------------------------------------------------------------------------------

    def new_lease(self, description: RequestDescription, arrays: Sequence[Any], out: Mapping[str, Any]) -> Lease:
        """Return where the tensors of a request are to be, of which `arrays` are the inputs."""
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
        """Whether it was made for a connection that is lost."""
        return lease.epoch != self._epoch

    def activate(self, request_id: str, lease: Lease) -> bool:
        """The request is being sent: what it names is nobody else's until it has ended. False if the lease is void."""
        if lease.epoch != self._epoch:
            return False
        if lease.shared_inputs or lease.output_buffers:
            self.leases[request_id] = lease
        return True

    def release(self, request_id: str, *, running: bool = False) -> None:
        """The request has ended, or nobody writes for it any more; `running`: only the former."""
        if not running:
            self.leases.pop(request_id, None)

    def read_outputs(
        self, request: RequestDescription, lease: Optional[Lease], response: InferResponse, frames: Sequence[Any]
    ) -> Dict[str, Any]:
        """Return the outputs of a request by name, whose `frames` are those that have one.

        Raises:
            InvalidArgument: one is not what it says, or not what `out` was made for.
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
        """Have an input in shared memory: where it is, or in a copy. Return False where there is none for it."""
        # What has memory of its own is not cut from an arena.
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
        """Room for an output, where the caller wants it if that is possible.

        In an array that is `user_array`, or None.
        """
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
    """Return the array that the caller has given for an output, with its values."""
    if user_array.dtype != array.dtype or user_array.shape != array.shape:
        expected = f"expected an array of {array.dtype} and shape {list(array.shape)}"
        raise WrongOut(f"out: {name}: {expected}, got {user_array.dtype} and {list(user_array.shape)}")
    if user_array.__array_interface__["data"][0] != array.__array_interface__["data"][0]:
        np.copyto(user_array, array)
    return user_array
