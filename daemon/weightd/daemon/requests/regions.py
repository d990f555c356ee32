"""Where tensors are that have no frame: in memory that a client has registered. The daemon only passes it on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightd.protocol.messages.data import TensorSpec
from weightd.protocol.messages.regions import MappedInput, MappedOutput, MappedRegions


class Memory:
    """A region: its descriptor, open for as long as anybody refers to this.

    Args:
        number: what workers know it by.
        descriptor: of it.
        nbytes: its size, which nobody can change.
        gone: is given the descriptor when nobody refers to this any more: it may be closed, which takes as long as the
            kernel needs to free all of the memory.
    """

    __slots__ = ("_descriptor", "_gone", "nbytes", "number")

    def __init__(self, number: int, descriptor: int, nbytes: int, gone: Callable[[int], object]) -> None:
        self.number = number
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._gone = gone

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def __del__(self) -> None:
        self._gone(self._descriptor)


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a region.

    Its length is that of a frame, and so are its slices: only `contents` asks for them. Memory that was never written
    to reads as zeros, and takes none by that.
    """

    memory: Memory
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(self.nbytes)
        return os.pread(self.memory.fileno(), end - begin, self.offset + begin)

    def part(self, begin: int, nbytes: int) -> Place:
        """Return where so many of its bytes are."""
        return Place(self.memory, self.offset + begin, nbytes)

    def overlaps(self, other: Place) -> bool:
        """Whether a byte is in both."""
        begin, end = max(self.offset, other.offset), min(self.offset + self.nbytes, other.offset + other.nbytes)
        return self.memory is other.memory and begin < end


class Places:
    """Those of one request, by the position of the tensor. Many requests may have the same.

    Attributes:
        inputs: where they are.
        outputs: where they may be written, if they have no more bytes.
        memories: the regions in which they are.
        mapped: what a worker is told of them, which knows the regions by their numbers; None where there are none.
    """

    __slots__ = ("inputs", "mapped", "memories", "outputs")

    def __init__(self, inputs: Mapping[int, Place], outputs: Mapping[int, Place]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.memories: Sequence[Memory] = tuple(
            {each.memory.number: each.memory for each in (*inputs.values(), *outputs.values())}.values()
        )
        self.mapped = _mapped(inputs, outputs) if self.memories else None

    @property
    def overlap(self) -> bool:
        """Whether an output may be written where an input is."""
        return any(output_location.overlaps(each) for output_location in self.outputs.values() for each in self.inputs.values())

    def without_outputs(self) -> Places:
        """Return the same with no room for outputs."""
        return Places(self.inputs, {})


def _mapped(inputs: Mapping[int, Place], outputs: Mapping[int, Place]) -> MappedRegions:
    return MappedRegions(
        tuple(MappedInput(index, each.memory.number, each.offset) for index, each in inputs.items()),
        tuple(MappedOutput(index, each.memory.number, each.offset, each.nbytes) for index, each in outputs.items()),
    )


NOWHERE = Places({}, {})


def tensors(
    inputs: Sequence[TensorSpec], frames: Sequence[Any], places: Places
) -> Iterator[tuple[TensorSpec, memoryview | Place]]:
    """Yield each input with its bytes, wherever these are."""
    rest = iter(frames)
    for index, spec in enumerate(inputs):
        location = places.inputs.get(index)
        yield spec, memoryview(next(rest)) if location is None else location
