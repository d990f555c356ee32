"""Tensors in memory that the daemon's workers see: which are there, since when, and when their memory is used again."""

from __future__ import annotations

import gc
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from weightd.pending import PendingCall
from weightd.protocol_core import ClientCore
from weightd.shm_tensors import MIN_SHARED_BYTES
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import Cancelled, InvalidArgument, RemoteProtocolError, Unavailable
from weightd_protocol.messages.inference import Error, Infer, InferResponse, ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import OutputLocation, Register, Registered, Released, Unregister
from weightd_protocol.messages.types import FROM_CLIENT
from weightd_protocol.tensors import from_frame, spec_of

N = MIN_SHARED_BYTES


class World:
    """A client, and a daemon whose model adds one to bytes, told step by step."""

    def __init__(self) -> None:
        self.core = ClientCore()
        self.regions: Dict[str, int] = {}
        self.said: List[Any] = []
        self.refuses = False
        self.core.shm_tensors.on_connected(can_share=True)

    def ask(self, x: Any, out: Optional[Dict[str, Any]] = None) -> Tuple[PendingCall, Infer, Sequence[Any]]:
        call, frames = self.core.prepare_infer("m", {"x": x}, 1.0, out=out)
        frames = self.core.track(call, frames)
        for message, region in self.core.shm_tensors.take_region_messages():
            self.said.append(message)
            if isinstance(message, Register) and region is not None:
                self.register(message.id, region.descriptor)
        request = decode(frames, FROM_CLIENT)
        assert isinstance(request, Infer)
        return call, request, frames[2:]

    def register(self, request_id: str, descriptor: int) -> None:
        name = f"r{len(self.regions)}"
        self.regions[name] = descriptor
        self.hear(Error(request_id, "RESOURCE_EXHAUSTED", "") if self.refuses else Registered(request_id, name))

    def hear(self, message: Any, *frames: Any) -> None:
        self.core.on_message([*encode(message), *frames])

    def read(self, request: Infer, frames: Sequence[Any]) -> Any:
        """What the worker gets."""
        [spec] = request.description.inputs
        regions = request.parameters.regions
        for place in regions.inputs if regions is not None else ():
            assert not frames
            return from_frame(spec, os.pread(self.regions[place.region], spec.nbytes, place.offset))
        return from_frame(spec, frames[0])

    def room(self, request: Infer) -> Optional[OutputLocation]:
        regions = request.parameters.regions
        return next(iter(regions.outputs), None) if regions is not None else None

    def write(self, request: Infer, y: Any) -> bool:
        """What the worker does with an output."""
        room = self.room(request)
        if room is None or y.nbytes > room.nbytes:
            return False
        # A worker writes only where each page has memory.
        assert os.lseek(self.regions[room.region], room.offset, os.SEEK_HOLE) >= room.offset + room.nbytes
        os.pwrite(self.regions[room.region], y.tobytes(), room.offset)
        return True

    def answer(self, request: Infer, y: Any, *, running: Optional[bool] = None) -> None:
        placed = self.write(request, y)
        description = ResponseDescription("m", (spec_of("y", y),))
        response = InferResponse(request.id, description, (0,) if placed else None, running)
        self.hear(response, *([] if placed else [y.tobytes()]))

    def infer(self, x: Any, out: Optional[Dict[str, Any]] = None) -> Tuple[Any, Infer]:
        call, request, frames = self.ask(x, out)
        self.answer(request, self.read(request, frames) + np.uint8(1))
        result: Any = call.result()
        return result["y"], request

    def warm(self, x: Any) -> None:
        """Ask until all of it goes through shared memory."""
        for _ in range(3):
            self.infer(x)


@pytest.fixture
def world() -> World:
    return World()


def bytes_of(count: int, value: int = 3) -> Any:
    return np.full(count, value, np.uint8)


def is_shared(request: Infer) -> Tuple[bool, bool]:
    """Whether input and output are."""
    regions = request.parameters.regions
    return (False, False) if regions is None else (bool(regions.inputs), bool(regions.outputs))


# --- what is where --------------------------------------------------------------------------------------------------


def test_nobody_waits_for_memory_to_be_shared(world: World) -> None:
    x = bytes_of(N)
    shared: List[Tuple[bool, bool]] = []
    for _ in range(3):
        y, request = world.infer(x)
        assert (y == 4).all()
        assert not y.flags.writeable
        shared.append(is_shared(request))
    assert shared == [(False, False), (True, True), (True, True)]
    assert [type(each) for each in world.said] == [Register]


def test_an_array_for_an_output_has_memory_before_a_worker_writes_there(world: World) -> None:
    world.warm(bytes_of(N))
    out = world.core.shm_tensors.arena.empty((N,), np.uint8)
    y, request = world.infer(bytes_of(N), {"y": out})
    assert y is out
    assert is_shared(request) == (True, True)
    assert (out == 4).all()


@pytest.mark.parametrize(("count", "dtype"), [(N - 1, np.uint8), (0, np.float32)])
def test_what_is_small_is_in_frames(world: World, count: int, dtype: Any) -> None:
    world.warm(bytes_of(N))
    for _ in range(3):
        assert is_shared(world.infer(np.zeros(count, dtype).view(np.uint8))[1]) == (False, False)


def test_what_cannot_be_shared_is_in_frames(world: World) -> None:
    world.refuses = True
    for _ in range(3):
        assert is_shared(world.infer(bytes_of(N))[1]) == (False, False)
    assert len(world.said) == 1
    world.core.shm_tensors.on_connected(can_share=False)
    assert is_shared(world.infer(bytes_of(N))[1]) == (False, False)


def test_an_array_of_the_arena_is_not_copied(world: World) -> None:
    world.warm(bytes_of(N))
    arena = world.core.shm_tensors.arena
    x, out = arena.empty((2, N), np.uint8), arena.empty((N,), np.uint8)
    x[...] = 7
    y, request = world.infer(x[1], {"y": out})
    assert y is out
    assert (out == 8).all()
    regions = request.parameters.regions
    assert regions is not None
    for array, place in ((x[1], regions.inputs[0]), (out, regions.outputs[0])):
        found = arena.find(array)
        assert found is not None
        assert found[1] == place.offset


def test_any_array_can_be_filled(world: World) -> None:
    world.warm(bytes_of(N))
    for out in (np.empty(N, np.uint8), np.empty((N, 2), np.uint8)[:, 0]):
        assert world.infer(bytes_of(N), {"y": out})[0] is out
        assert (out == 4).all()
    out = np.empty(4, np.uint8)
    assert world.infer(bytes_of(4), {"y": out})[0] is out
    assert (out == 4).all()


@pytest.mark.parametrize("out", [np.empty(N - 1, np.uint8), np.empty(N, np.int8), [1], np.broadcast_to(np.uint8(1), N)])
def test_what_an_output_does_not_fit_in_is_refused(world: World, out: Any) -> None:
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="out: y: expected a"):
            world.infer(bytes_of(N), {"y": out})


def test_an_output_that_outgrows_its_room_comes_in_a_frame(world: World) -> None:
    x = bytes_of(N)
    world.warm(x)
    for size in (2 * N, 2 * N, N):
        call, request, _ = world.ask(x)
        world.answer(request, bytes_of(size))
        result: Any = call.result()
        assert len(result["y"]) == size
    assert world.room(request) == OutputLocation(0, "r0", world.room(request).offset, 2 * N)  # type: ignore[union-attr]


@pytest.mark.parametrize("placed", [(0,), (0, 1)])
def test_an_output_where_there_was_no_room_breaks_the_protocol(world: World, placed: Tuple[int, ...]) -> None:
    call, request, _ = world.ask(bytes_of(N))
    specs = tuple(TensorSpec(f"y{index}", "UINT8", (N,)) for index in placed)
    world.hear(InferResponse(request.id, ResponseDescription("m", specs), placed))
    with pytest.raises(RemoteProtocolError, match="in memory that the request did not offer"):
        call.result()


def test_an_output_of_no_truth_value_breaks_the_protocol_in_shared_memory_too(world: World) -> None:
    world.warm(bytes_of(N))
    call, request, _ = world.ask(bytes_of(N))
    assert world.write(request, bytes_of(N, 2))
    world.hear(InferResponse(request.id, ResponseDescription("m", (TensorSpec("y", "BOOL", (N,)),)), (0,)))
    with pytest.raises(RemoteProtocolError, match="expected 0 or 1"):
        call.result()


# --- until when -----------------------------------------------------------------------------------------------------


def places(request: Infer) -> List[Tuple[int, int]]:
    regions = request.parameters.regions
    assert regions is not None
    return [
        *((place.offset, N) for place in regions.inputs),
        *((place.offset, place.nbytes) for place in regions.outputs),
    ]


def overlap(one: Infer, other: Infer) -> bool:
    return any(a < c + d and c < a + b for a, b in places(one) for c, d in places(other))


def test_memory_is_used_again_once_it_is_nobodys(world: World) -> None:
    world.warm(bytes_of(N))
    assert {*places(world.infer(bytes_of(N))[1])} == {*places(world.infer(bytes_of(N))[1])}
    held, one = world.infer(bytes_of(N))
    view = held[10:20]
    del held
    _, other = world.infer(bytes_of(N, 9))
    assert places(one)[1] != places(other)[1]
    assert (view == 4).all()


def test_a_late_write_never_lands_where_something_else_is(world: World) -> None:
    world.warm(bytes_of(N))
    call, late, _ = world.ask(bytes_of(N))
    world.hear(Error(late.id, "CANCELLED", "", may_still_write=True))
    with pytest.raises(Cancelled):
        call.result()
    del call
    y, request = world.infer(bytes_of(N))
    assert not overlap(late, request)
    world.write(late, bytes_of(N, 66))
    assert (y == 4).all()
    del y
    world.hear(Released(late.id))
    assert overlap(late, world.infer(bytes_of(N))[1])


def test_who_gives_up_keeps_nothing_from_those_that_follow(world: World) -> None:
    world.warm(bytes_of(N))
    call, given_up, _ = world.ask(bytes_of(N))
    del call
    gc.collect()
    assert not overlap(given_up, world.infer(bytes_of(N))[1])
    world.answer(given_up, bytes_of(N))
    assert overlap(given_up, world.infer(bytes_of(N))[1])


def test_an_answer_that_may_still_be_written_to_is_copied(world: World) -> None:
    world.warm(bytes_of(N))
    call, request, _ = world.ask(bytes_of(N))
    world.answer(request, bytes_of(N, 5), running=True)
    result: Any = call.result()
    world.write(request, bytes_of(N, 66))
    assert (result["y"] == 5).all()
    assert not overlap(request, world.infer(bytes_of(N))[1])


def test_with_another_connection_all_is_registered_anew_and_what_was_offered_is_never_used_again(world: World) -> None:
    world.warm(bytes_of(N))
    x = world.core.shm_tensors.arena.empty((N,), np.uint8)
    x[...] = 1
    _, late, _ = world.ask(bytes_of(N))
    before = list(world.core.shm_tensors.arena.regions)
    # Made for the connection that is lost; sent over the next one.
    call, _ = world.core.prepare_infer("m", {"x": x}, 1.0)
    world.core.fail_all(Unavailable, "lost")
    world.core.shm_tensors.on_connected(can_share=True)
    again = world.core.frames_without_sharing(call)
    assert again is not None
    assert is_shared(decode(again, FROM_CLIENT)) == (False, False)  # type: ignore[arg-type]
    assert bytes(again[2]) == x.tobytes()
    world.said.clear()
    outputs = [world.infer(x) for _ in range(3)]
    assert is_shared(outputs[-1][1])[1]
    world.write(late, bytes_of(N, 66))
    assert all((y == 2).all() for y, _ in outputs)
    assert [type(each) for each in world.said] == [Register]
    assert not {*before} & {*world.core.shm_tensors.arena.regions}


def test_a_region_is_given_up_when_no_request_can_name_it_any_more(world: World) -> None:
    world.warm(bytes_of(N))
    question = world.core.prepare_infer("m", {"x": bytes_of(N)}, 1.0)
    arena = world.core.shm_tensors.arena
    arena.before_fork()
    arena.after_fork(in_child=False)
    world.infer(bytes_of(N))
    assert Unregister not in map(type, world.said)
    del question
    gc.collect()
    world.infer(bytes_of(N))
    assert [each.region for each in world.said if isinstance(each, Unregister)] == ["r0"]


def test_regions_that_were_let_go_are_given_up(world: World) -> None:
    world.warm(bytes_of(N))
    gc.collect()
    world.warm(bytes_of(17 << 20))
    assert [type(each) for each in world.said[:3]] == [Register, Unregister, Register]
    assert world.said[1].region == "r0"
