"""Which tensors of a client's requests are in memory that the daemon's workers see, and until when. Without a socket.

Nobody waits for that: a tensor is in such memory if its region is known to the daemon by then, and else in a frame, as
it is where memory cannot be shared at all.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy as np

from weightd.client.arena import Arena, Block, Region
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.data import InferResponse, RequestDescription, ResponseDescription
from weightd.protocol.messages.regions import Register, Unregister
from weightd.protocol.tensors import from_frame, from_memory

# A smaller tensor costs less in a frame.
LEAST_BYTES = 64 * 1024

# Shapes whose outputs are remembered; those that came first go first.
_MAX_LARGE = 256

_NONE: Dict[Any, Any] = {}

Message = Union[Register, Unregister]


class WrongOut(InvalidArgument):
    """An array that was given for an output is not what the output is."""


# Of an input: position, region and offset, as a request names them; of room for an output its bytes, too.
NamedInput = Tuple[int, str, int]
NamedRoom = Tuple[int, str, int, int]


class Given:
    """Room in an array that the caller has, as a `Block` is: the whole of it, which is in a region."""

    __slots__ = ("_array", "nbytes", "offset", "region")

    def __init__(self, array: Any, region: Region, offset: int) -> None:
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
        in_frames: inputs that are nowhere else.
        inputs: those that are.
        copies: where these were copied to.
        rooms: for outputs, by their position.
        named: the same, as the request names them.
    """

    epoch: int
    arrays: Sequence[Any]
    out: Mapping[str, Any]
    in_frames: List[Any]
    inputs: List[NamedInput]
    copies: List[Block]
    rooms: Dict[int, Union[Block, Given]]
    named: List[NamedRoom]


class Sharing:
    """The shared memory of one client.

    May be used by several threads: one at a time tells it what the daemon has said, or what is to be said.

    Args:
        next_id: gives the ids of messages.

    Attributes:
        arena: where the memory is from.
        settled: the regions of which there is nothing to say; None where that may change at any time.
        leases: of requests that have not ended, or whose memory a worker may still write to, by id.
        large: of requests that are answered with large outputs, by the identity of their description: with itself, so
            that it stays its own, the description of the answer, and position, name and bytes of each large output.
    """

    def __init__(self, next_id: Callable[[], str]) -> None:
        self.arena = Arena()
        self.settled: Optional[Tuple[Region, ...]] = ()
        self.leases: Dict[str, Lease] = {}
        self.large: Dict[int, Tuple[RequestDescription, ResponseDescription, Sequence[Tuple[int, str, int]]]] = {}
        self._next_id = next_id
        self._lock = threading.Lock()
        # Another one with each connection.
        self._epoch = 0
        # Whether regions may be registered on the present connection, and their names there.
        self._is_possible = False
        self._names: Dict[Region, str] = {}
        self._asked: Dict[str, Region] = {}
        self._refused: Set[Region] = set()

    # --- the connection -----------------------------------------------------------------------------------------

    def connected(self, *, is_possible: bool) -> None:
        """There is another connection: on that nothing is registered yet."""
        self.disconnected()
        self._is_possible = is_possible

    def disconnected(self) -> None:
        """The connection is lost: nobody will tell when workers are done with what was under way."""
        self._is_possible = False
        self._epoch += 1
        with self._lock:
            for known in (self._names, self._asked, self._refused):
                known.clear()
            self.settled = ()
            leases, self.leases = self.leases, {}
        self.arena.retire(tuple({room.region for lease in leases.values() for room in lease.rooms.values()}))

    def due(self) -> Sequence[Tuple[Message, Optional[Region]]]:
        """Return what is to be said before the next request, each with the region whose descriptor goes with it.

        Nothing, where the arena's regions are those that are `settled`.
        """
        regions = self.arena.regions
        if not self._is_possible or regions is self.settled:
            return ()
        due: List[Tuple[Message, Optional[Region]]] = []
        with self._lock:
            gone = [region for region in self._names if region not in regions]
            free = [region for region in gone if region.is_free]
            due += [(Unregister(self._next_id(), self._names.pop(region)), None) for region in free]
            for region in regions:
                if not (region in self._names or region in self._refused or region in self._asked.values()):
                    register = Register(self._next_id())
                    self._asked[register.id] = region
                    due.append((register, region))
            self._refused.intersection_update(regions)
            # The name of one that was let go is still known: a request may be about to name it.
            self.settled = None if len(free) < len(gone) else regions
        return due

    def registered(self, request_id: str, name: str) -> None:
        """The daemon knows a region."""
        with self._lock:
            region = self._asked.pop(request_id, None)
            if region is not None:
                self._names[region] = name

    def refused(self, request_id: str) -> bool:
        """A message has ended in an error; return whether it was about a region. That one is not offered again."""
        with self._lock:
            region = self._asked.pop(request_id, None)
            if region is not None:
                self._refused.add(region)
        return region is not None

    # --- requests -----------------------------------------------------------------------------------------------

    def lease(self, description: RequestDescription, arrays: Sequence[Any], out: Mapping[str, Any]) -> Lease:
        """Return where the tensors of a request are to be, of which `arrays` are the inputs."""
        lease = Lease(self._epoch, arrays, out, [], [], [], {}, [])
        if not self._is_possible:
            lease.in_frames.extend(arrays)
            return lease
        for index, nbytes in enumerate(description.sizes):
            array = arrays[index]
            if nbytes < LEAST_BYTES or not self._lend(lease, index, array, nbytes):
                lease.in_frames.append(array)
        large = self.large.get(id(description))
        if large is not None:
            for index, name, nbytes in large[2]:
                room = self._room(nbytes, out.get(name))
                known_as = None if room is None else self._names.get(room.region)
                if room is not None and known_as is not None:
                    lease.rooms[index] = room
                    lease.named.append((index, known_as, room.offset, room.nbytes))
        return lease

    def is_void(self, lease: Lease) -> bool:
        """Whether it was made for a connection that is lost."""
        return lease.epoch != self._epoch

    def begin(self, request_id: str, lease: Lease) -> bool:
        """The request is being sent: what it names is nobody else's until it has ended. False if the lease is void."""
        if lease.epoch != self._epoch:
            return False
        if lease.inputs or lease.rooms:
            self.leases[request_id] = lease
        return True

    def end(self, request_id: str, *, running: bool = False) -> None:
        """The request has ended, or nobody writes for it any more; `running`: only the former."""
        if not running:
            self.leases.pop(request_id, None)

    def outputs(
        self, request: RequestDescription, lease: Optional[Lease], response: InferResponse, frames: Sequence[Any]
    ) -> Dict[str, Any]:
        """Return the outputs of a request by name, whose `frames` are those that have one.

        Raises:
            InvalidArgument: one is not what it says, or not what `out` was made for.
        """
        description = response.description
        if description.largest >= LEAST_BYTES:
            known = self.large.get(id(request))
            if known is None or known[1] is not description:
                self._remember(request, description)
        outputs: Dict[str, Any] = {}
        placed, rest = response.placed or (), iter(frames)
        rooms, out = (_NONE, _NONE) if lease is None else (lease.rooms, lease.out)
        for index, spec in enumerate(description.outputs):
            name = spec.name
            if index not in placed:
                array = from_frame(spec, next(rest))
            elif index not in rooms or rooms[index].nbytes < description.sizes[index]:
                raise InvalidArgument("an output is said to be where no room was offered")
            else:
                array = from_memory(spec, rooms[index].array)
                if response.running:
                    array = array.copy()
                array.flags.writeable = False
            outputs[name] = _filled(name, out[name], array) if name in out else array
        return outputs

    # --- within -------------------------------------------------------------------------------------------------

    def _lend(self, lease: Lease, index: int, array: Any, nbytes: int) -> bool:
        """Have an input in shared memory: where it is, or in a copy. Return False where there is none for it."""
        # What has memory of its own is not cut from an arena.
        found = None if array.base is None else self.arena.find(array)
        if found is not None:
            region, offset = found
            name = self._names.get(region)
            if name is None:
                return False
        else:
            block = self.arena.take(nbytes)
            name = None if block is None else self._names.get(block.region)
            if block is None or name is None:
                return False
            offset = block.offset
            block.region.write(offset, array)
            lease.copies.append(block)
        lease.inputs.append((index, name, offset))
        return True

    def _room(self, nbytes: int, given: Any) -> Optional[Union[Block, Given]]:
        """Room for an output, where the caller wants it if that is possible: in an array that is `given`, or None."""
        found = None if given is None or not given.flags.c_contiguous else self.arena.find(given)
        room = self.arena.take(nbytes) if found is None else Given(given, *found)
        if room is not None and room.nbytes:
            room.region.populate(room.offset, room.nbytes)
        return room

    def _remember(self, request: RequestDescription, response: ResponseDescription) -> None:
        large = [
            (index, spec.name, nbytes)
            for index, (spec, nbytes) in enumerate(zip(response.outputs, response.sizes))
            if nbytes >= LEAST_BYTES
        ]
        with self._lock:
            if id(request) not in self.large and len(self.large) >= _MAX_LARGE:
                del self.large[next(iter(self.large))]
            self.large[id(request)] = request, response, large


def _filled(name: str, given: Any, array: Any) -> Any:
    """Return the array that the caller has given for an output, with its values."""
    if given.dtype != array.dtype or given.shape != array.shape:
        expected = f"expected an array of {array.dtype} and shape {list(array.shape)}"
        raise WrongOut(f"out: {name}: {expected}, got {given.dtype} and {list(given.shape)}")
    if given.__array_interface__["data"][0] != array.__array_interface__["data"][0]:
        np.copyto(given, array)
    return given
