"""Where tensors are that have no frame: in memory that a client has registered. The daemon only passes it on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions

# More than one connection may have, so what a request needs always fits.
MAX_REGIONS = 64


class SharedRegion:
    """A region: its descriptor, open for as long as anybody refers to this.

    Args:
        number: what workers know it by.
        descriptor: of it.
        nbytes: its size, which nobody can change.
        on_unreferenced: is given the descriptor when nobody refers to this any more: it may be closed, which takes as
            long as the kernel needs to free all of the memory.
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
    """The regions that one worker has been given, by number. Those that were not used for longest give way.

    Orders are obeyed in the order in which they are given: a region may be taken away behind the last predict that
    names it, whether or not that has run.

    Attributes:
        latest_number: the one that was used last: as long as requests name that alone, there is nothing to say. None
            where there is none.
    """

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        self.latest_number: int | None = None
        self._max_regions = max_regions
        # The one that was used last is the last.
        self._numbers: dict[int, None] = {}

    def mark_used(self, regions: Sequence[SharedRegion]) -> tuple[Sequence[int], Sequence[SharedRegion]]:
        """A request is given to the worker: return what has to be taken away before, and what has to be given."""
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
        """A region is gone; return whether the worker had it."""
        if number == self.latest_number:
            self.latest_number = None
        return self._numbers.pop(number, 0) is None

    def clear(self) -> None:
        """It is another process, or has forgotten all."""
        self._numbers.clear()
        self.latest_number = None


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A part of a region.

    Its length is that of a frame, and so are its slices: only `contents` asks for them. Memory that was never written
    to reads as zeros, and takes none by that.
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
        """Return where so many of its bytes are."""
        return TensorLocation(self.region, self.offset + begin, nbytes)

    def overlaps(self, other: TensorLocation) -> bool:
        """Whether a byte is in both."""
        begin, end = max(self.offset, other.offset), min(self.offset + self.nbytes, other.offset + other.nbytes)
        return self.region is other.region and begin < end


class TensorLocations:
    """Those of one request, by the position of the tensor. Many requests may have the same.

    Attributes:
        inputs: where they are.
        outputs: where they may be written, if they have no more bytes.
        regions: the regions in which they are.
        mapped_regions: what a worker is told of them, which knows the regions by their numbers; None where there are
            none.
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
        """Whether an output may be written where an input is."""
        return any(
            output_location.overlaps(each) for output_location in self.outputs.values() for each in self.inputs.values()
        )

    def without_outputs(self) -> TensorLocations:
        """Return the same with no room for outputs."""
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
    """Yield each input with its bytes, wherever these are."""
    remaining_frames = iter(frames)
    for index, spec in enumerate(inputs):
        location = locations.inputs.get(index)
        yield spec, memoryview(next(remaining_frames)) if location is None else location
