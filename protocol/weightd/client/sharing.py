"""Which tensors of a client's requests are in memory that the daemon's workers see, and until when. Without a socket.

Nobody waits for that: a tensor is in such memory if its region is known to the daemon by then, and else in a frame, as
it is where memory cannot be shared at all.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import numpy as np

from weightd.client.arena import Arena, Block, Region
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.data import InferResponse, RequestDescription, ResponseDescription
from weightd.protocol.messages.regions import Register, Unregister
from weightd.protocol.tensors import from_frame

# A smaller tensor costs less in a frame.
LEAST_BYTES = 64 * 1024

# Shapes whose outputs are remembered; those that came first go first.
_MAX_LARGE = 256

_BYTE = np.dtype(np.uint8)

Message = Union[Register, Unregister]


class WrongOut(InvalidArgument):
    """An array that was given for an output is not what the output is."""


# Of an input: position, region and offset, as a request names them; of room for an output its bytes, too.
NamedInput = Tuple[int, str, int]
NamedRoom = Tuple[int, str, int, int]


class Room:
    """Where an output may be written: as the request names it, its region, and its bytes."""

    __slots__ = ("content", "named", "region")

    def __init__(self, named: NamedRoom, region: Region, content: Any) -> None:
        self.named = named
        self.region = region
        self.content = content


class Lease:
    """The tensors of one request, which keep their memory as long as it is under way.

    Attributes:
        epoch: of the connection that it is for.
        arrays: the inputs, as the caller has them.
        in_frames: those of them that are nowhere else.
        inputs: those that are.
        rooms: for outputs, by their position.
        out: arrays for outputs, by name.
    """

    __slots__ = ("_kept", "arrays", "epoch", "in_frames", "inputs", "out", "rooms")

    def __init__(self, epoch: int, arrays: Sequence[Any], out: Mapping[str, Any]) -> None:
        self.epoch = epoch
        self.arrays = arrays
        self.out = out
        self.in_frames: List[Any] = []
        self.inputs: List[NamedInput] = []
        self.rooms: Dict[int, Room] = {}
        self._kept: List[Any] = []

    def keep(self, array: Any) -> None:
        """Keep an array for as long as the request is under way."""
        self._kept.append(array)


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
            that it stays its own, name and bytes of each output.
    """

    def __init__(self, next_id: Callable[[], str]) -> None:
        self.arena = Arena()
        self.settled: Optional[Tuple[Region, ...]] = ()
        self.leases: Dict[str, Lease] = {}
        self.large: Dict[int, Tuple[RequestDescription, Sequence[Tuple[str, int]]]] = {}
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
        lease = Lease(self._epoch, arrays, out)
        for index, array in enumerate(arrays):
            place = self._input(lease, array) if array.nbytes >= LEAST_BYTES and self._is_possible else None
            if place is None:
                lease.in_frames.append(array)
            else:
                lease.inputs.append((index, *place))
        _, outputs = self.large.get(id(description), (None, ()))
        for index, (name, nbytes) in enumerate(outputs if self._is_possible else ()):
            room = self._room(index, nbytes, out.get(name)) if nbytes >= LEAST_BYTES else None
            if room is not None:
                lease.rooms[index] = room
        return lease

    def is_void(self, lease: Lease) -> bool:
        """Whether it was made for a connection that is lost."""
        return lease.epoch != self._epoch

    def begin(self, request_id: str, lease: Lease) -> None:
        """The request is being sent: what it names is nobody else's until it has ended."""
        if lease.inputs or lease.rooms:
            self.leases[request_id] = lease

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
        if response.description.largest >= LEAST_BYTES:
            self._remember(request, response.description)
        outputs: Dict[str, Any] = {}
        rest = iter(frames)
        for index, spec in enumerate(response.description.outputs):
            if index in response.elsewhere:
                array = from_frame(spec, _written(lease, index, spec.nbytes))
                if response.running:
                    array = array.copy()
                array.flags.writeable = False
            else:
                array = from_frame(spec, next(rest))
            given = None if lease is None else lease.out.get(spec.name)
            outputs[spec.name] = array if given is None else _filled(spec.name, given, array)
        return outputs

    # --- within -------------------------------------------------------------------------------------------------

    def _input(self, lease: Lease, array: Any) -> Optional[Tuple[str, int]]:
        found = self.arena.find(array)
        if found is not None:
            name = self._names.get(found[0])
            return None if name is None else (name, found[1])
        taken = self._take(array.nbytes, touched=False)
        if taken is None:
            return None
        name, block = taken
        copy = block.array(array.shape, array.dtype)
        np.copyto(copy, array)
        lease.keep(copy)
        return name, block.offset

    def _room(self, index: int, nbytes: int, given: Any) -> Optional[Room]:
        """Room for an output, where it is wanted if that is possible."""
        found = self.arena.find(given) if given is not None and given.flags.c_contiguous else None
        if given is not None and found is not None:
            region, offset = found
            name = self._names.get(region)
            content = given.reshape(-1).view(_BYTE)
            return None if name is None else Room((index, name, offset, given.nbytes), region, content)
        taken = self._take(nbytes, touched=True)
        if taken is None:
            return None
        name, block = taken
        return Room((index, name, block.offset, nbytes), block.region, block.array((nbytes,), _BYTE))

    def _remember(self, request: RequestDescription, response: ResponseDescription) -> None:
        outputs = [(spec.name, spec.nbytes) for spec in response.outputs]
        with self._lock:
            if id(request) not in self.large and len(self.large) >= _MAX_LARGE:
                del self.large[next(iter(self.large))]
            self.large[id(request)] = request, outputs

    def _take(self, nbytes: int, *, touched: bool) -> Optional[Tuple[str, Block]]:
        block = self.arena.take(nbytes, touched=touched)
        name = None if block is None else self._names.get(block.region)
        return None if block is None or name is None else (name, block)


def _written(lease: Optional[Lease], index: int, nbytes: int) -> Any:
    room = None if lease is None else lease.rooms.get(index)
    if room is None or room.content.nbytes < nbytes:
        raise InvalidArgument("an output is said to be where no room was offered")
    return room.content[:nbytes]


def _filled(name: str, given: Any, array: Any) -> Any:
    """Return the array that the caller has given for an output, with its values."""
    if given.dtype != array.dtype or given.shape != array.shape:
        expected = f"expected an array of {array.dtype} and shape {list(array.shape)}"
        raise WrongOut(f"out: {name}: {expected}, got {given.dtype} and {list(given.shape)}")
    if given.__array_interface__["data"][0] != array.__array_interface__["data"][0]:
        np.copyto(given, array)
    return given
