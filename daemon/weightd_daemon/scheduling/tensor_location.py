"""Locations of tensors in the shared memory of clients. The daemon passes them on to workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions

# Maximum number of regions that a worker keeps mapped. A connection may register fewer, so the regions of one request
# always fit.
MAX_REGIONS = 64


class SharedRegion:
    """A shared memory region of a client. The descriptor stays open while this object is referenced.

    Args:
        number: the number that identifies the region to workers.
        descriptor: the file descriptor of the region.
        nbytes: the size of the region in bytes, which a seal of the memfd makes unchangeable.
        on_unreferenced: called with the descriptor when no reference to the object is left. The callback may close the
            descriptor, which takes as long as the kernel needs to free the memory.
    """

    __slots__ = ("_descriptor", "_on_unreferenced", "nbytes", "number")

    def __init__(self, number: int, descriptor: int, nbytes: int, on_unreferenced: Callable[[int], object]) -> None:
        self.number = number
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._on_unreferenced = on_unreferenced

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def __del__(self) -> None:
        self._on_unreferenced(self._descriptor)


class WorkerRegions:
    """The regions that one worker has mapped, by number. The least recently used ones are unmapped first.

    A worker executes orders in sequence. So the daemon may send the order to unmap a region right after the last
    predict that uses the region, even if the predict has not run yet.

    Attributes:
        latest_number: the number of the region that was used last, or None. If a request uses only this region, the
            worker needs no message about regions.
    """

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        self.latest_number: int | None = None
        self._max_regions = max_regions
        # The numbers of the mapped regions, as keys in order of use, the latest last.
        self._numbers: dict[int, None] = {}

    def mark_used(self, regions: Sequence[SharedRegion]) -> tuple[Sequence[int], Sequence[SharedRegion]]:
        """Record that a request uses these regions; return the numbers of regions to unmap first, and those to map."""
        missing = [memory for memory in regions if memory.number not in self._numbers]
        for memory in regions:
            self._numbers.pop(memory.number, None)
            self._numbers[memory.number] = None
            self.latest_number = memory.number
        surplus = [*self._numbers][: -self._max_regions]
        for number in surplus:
            del self._numbers[number]
        return surplus, missing

    def remove(self, number: int) -> bool:
        """Forget a region that has been closed; return whether the worker had mapped it."""
        if number == self.latest_number:
            self.latest_number = None
        return self._numbers.pop(number, 0) is None

    def clear(self) -> None:
        """Forget all regions, because another process has replaced the worker, or the worker has unmapped them."""
        self._numbers.clear()
        self.latest_number = None


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A range of bytes in a shared memory region.

    Like a frame, a location has a length, and its slices are bytes. Only `fault_isolation.contents` and
    `batching.split` read these bytes. Memory that was never written reads as zeros, and the read allocates no memory.
    """

    region: SharedRegion
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, byte_range: slice) -> bytes:
        begin, end, _ = byte_range.indices(self.nbytes)
        return os.pread(self.region.fileno(), end - begin, self.offset + begin)

    def subrange(self, begin: int, nbytes: int) -> TensorLocation:
        """Return the location of `nbytes` of these bytes, starting at `begin`."""
        return TensorLocation(self.region, self.offset + begin, nbytes)

    def overlaps(self, other: TensorLocation) -> bool:
        """Return whether the two ranges have a byte in common."""
        begin, end = max(self.offset, other.offset), min(self.offset + self.nbytes, other.offset + other.nbytes)
        return self.region is other.region and begin < end


class TensorLocations:
    """The locations of one request's tensors, by tensor index. Several requests may share one object.

    Attributes:
        inputs: the locations of inputs.
        outputs: the locations to which a worker may write outputs, if the outputs fit.
        regions: the regions of all locations.
        mapped_regions: the description of the locations for workers, which know regions by number; None without
            locations.
    """

    __slots__ = ("inputs", "mapped_regions", "outputs", "regions")

    def __init__(self, inputs: Mapping[int, TensorLocation], outputs: Mapping[int, TensorLocation]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.regions: Sequence[SharedRegion] = tuple(
            {each.region.number: each.region for each in (*inputs.values(), *outputs.values())}.values()
        )
        self.mapped_regions = _mapped_regions(inputs, outputs) if self.regions else None

    @property
    def has_overlap(self) -> bool:
        """Whether an output location overlaps an input location."""
        return any(
            output_location.overlaps(each) for output_location in self.outputs.values() for each in self.inputs.values()
        )

    def without_outputs(self) -> TensorLocations:
        """Return the same locations without output locations."""
        return TensorLocations(self.inputs, {})


def _mapped_regions(inputs: Mapping[int, TensorLocation], outputs: Mapping[int, TensorLocation]) -> MappedRegions:
    return MappedRegions(
        tuple(MappedInput(index, each.region.number, each.offset) for index, each in inputs.items()),
        tuple(MappedOutput(index, each.region.number, each.offset, each.nbytes) for index, each in outputs.items()),
    )


NO_LOCATIONS = TensorLocations({}, {})


def iterate_tensors(
    inputs: Sequence[TensorSpec], frames: Sequence[Any], locations: TensorLocations
) -> Iterator[tuple[TensorSpec, memoryview | TensorLocation]]:
    """Yield the specification of each input with its bytes, from the input's frame or location."""
    remaining_frames = iter(frames)
    for index, spec in enumerate(inputs):
        location = locations.inputs.get(index)
        yield spec, memoryview(next(remaining_frames)) if location is None else location
