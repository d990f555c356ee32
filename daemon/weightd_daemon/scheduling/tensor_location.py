"""Where tensors are that have no frame: in memory that a client has registered. The daemon only passes it on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.messages.regions import MappedInput, MappedOutput, MappedRegions


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
