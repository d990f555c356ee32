"""Tests of tensors in shared memory: which tensors use it, from when on, and when their memory is reused."""

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


class SharedMemorySession:
    """A client and a daemon, run step by step, whose model adds one to bytes."""

    def __init__(self) -> None:
        self.core = ClientCore()
        self.regions: Dict[str, int] = {}
        self.sent: List[Any] = []
        self.refuses = False
        self.core.shm_tensors.on_connected(can_share=True)

    def ask(self, x: Any, out: Optional[Dict[str, Any]] = None) -> Tuple[PendingCall, Infer, Sequence[Any]]:
        call, frames = self.core.prepare_infer("m", {"x": x}, 1.0, out=out)
        frames = self.core.track(call, frames)
        for message, region in self.core.shm_tensors.take_region_messages():
            self.sent.append(message)
            if isinstance(message, Register) and region is not None:
                self.register(message.id, region.descriptor)
        request = decode(frames, FROM_CLIENT)
        assert isinstance(request, Infer)
        return call, request, frames[2:]

    def register(self, request_id: str, descriptor: int) -> None:
        name = f"r{len(self.regions)}"
        self.regions[name] = descriptor
        self.receive(Error(request_id, "RESOURCE_EXHAUSTED", "") if self.refuses else Registered(request_id, name))

    def receive(self, message: Any, *frames: Any) -> None:
        self.core.on_message([*encode(message), *frames])

    def read(self, request: Infer, frames: Sequence[Any]) -> Any:
        """Return the input as the worker reads it."""
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
        """Write the output as the worker does; return whether it fits."""
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
        self.receive(response, *([] if placed else [y.tobytes()]))

    def infer(self, x: Any, out: Optional[Dict[str, Any]] = None) -> Tuple[Any, Infer]:
        call, request, frames = self.ask(x, out)
        self.answer(request, self.read(request, frames) + np.uint8(1))
        result: Any = call.result()
        return result["y"], request

    def warm(self, x: Any) -> None:
        """Send requests until input and output both use shared memory."""
        for _ in range(3):
            self.infer(x)


@pytest.fixture
def session() -> SharedMemorySession:
    return SharedMemorySession()


def bytes_of(count: int, value: int = 3) -> Any:
    return np.full(count, value, np.uint8)


def is_shared(request: Infer) -> Tuple[bool, bool]:
    """Return whether input and output use shared memory."""
    regions = request.parameters.regions
    return (False, False) if regions is None else (bool(regions.inputs), bool(regions.outputs))


# --- which tensors are shared ---------------------------------------------------------------------------------------


def test_requests_do_not_wait_for_registration(session: SharedMemorySession) -> None:
    x = bytes_of(N)
    shared: List[Tuple[bool, bool]] = []
    for _ in range(3):
        y, request = session.infer(x)
        assert (y == 4).all()
        assert not y.flags.writeable
        shared.append(is_shared(request))
    assert shared == [(False, False), (True, True), (True, True)]
    assert [type(each) for each in session.sent] == [Register]


def test_populates_output_array_before_request(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    out = session.core.shm_tensors.arena.empty((N,), np.uint8)
    y, request = session.infer(bytes_of(N), {"y": out})
    assert y is out
    assert is_shared(request) == (True, True)
    assert (out == 4).all()


@pytest.mark.parametrize(("count", "dtype"), [(N - 1, np.uint8), (0, np.float32)])
def test_sends_small_tensors_in_frames(session: SharedMemorySession, count: int, dtype: Any) -> None:
    session.warm(bytes_of(N))
    for _ in range(3):
        assert is_shared(session.infer(np.zeros(count, dtype).view(np.uint8))[1]) == (False, False)


def test_uses_frames_if_sharing_is_rejected(session: SharedMemorySession) -> None:
    session.refuses = True
    for _ in range(3):
        assert is_shared(session.infer(bytes_of(N))[1]) == (False, False)
    assert len(session.sent) == 1
    session.core.shm_tensors.on_connected(can_share=False)
    assert is_shared(session.infer(bytes_of(N))[1]) == (False, False)


def test_does_not_copy_arena_arrays(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    arena = session.core.shm_tensors.arena
    x, out = arena.empty((2, N), np.uint8), arena.empty((N,), np.uint8)
    x[...] = 7
    y, request = session.infer(x[1], {"y": out})
    assert y is out
    assert (out == 8).all()
    regions = request.parameters.regions
    assert regions is not None
    for array, place in ((x[1], regions.inputs[0]), (out, regions.outputs[0])):
        found = arena.find(array)
        assert found is not None
        assert found[1] == place.offset


def test_fills_any_array(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    for out in (np.empty(N, np.uint8), np.empty((N, 2), np.uint8)[:, 0]):
        assert session.infer(bytes_of(N), {"y": out})[0] is out
        assert (out == 4).all()
    out = np.empty(4, np.uint8)
    assert session.infer(bytes_of(4), {"y": out})[0] is out
    assert (out == 4).all()


@pytest.mark.parametrize("out", [np.empty(N - 1, np.uint8), np.empty(N, np.int8), [1], np.broadcast_to(np.uint8(1), N)])
def test_rejects_output_array_that_does_not_fit(session: SharedMemorySession, out: Any) -> None:
    for _ in range(3):
        with pytest.raises(InvalidArgument, match="out: y: expected a"):
            session.infer(bytes_of(N), {"y": out})


def test_larger_output_arrives_in_a_frame(session: SharedMemorySession) -> None:
    x = bytes_of(N)
    session.warm(x)
    for size in (2 * N, 2 * N, N):
        call, request, _ = session.ask(x)
        session.answer(request, bytes_of(size))
        result: Any = call.result()
        assert len(result["y"]) == size
    assert session.room(request) == OutputLocation(0, "r0", session.room(request).offset, 2 * N)  # type: ignore[union-attr]


@pytest.mark.parametrize("placed", [(0,), (0, 1)])
def test_unoffered_shared_output_breaks_protocol(session: SharedMemorySession, placed: Tuple[int, ...]) -> None:
    call, request, _ = session.ask(bytes_of(N))
    specs = tuple(TensorSpec(f"y{index}", "UINT8", (N,)) for index in placed)
    session.receive(InferResponse(request.id, ResponseDescription("m", specs), placed))
    with pytest.raises(RemoteProtocolError, match="in memory that the request did not offer"):
        call.result()


def test_invalid_shared_bool_breaks_protocol(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    call, request, _ = session.ask(bytes_of(N))
    assert session.write(request, bytes_of(N, 2))
    session.receive(InferResponse(request.id, ResponseDescription("m", (TensorSpec("y", "BOOL", (N,)),)), (0,)))
    with pytest.raises(RemoteProtocolError, match="expected 0 or 1"):
        call.result()


# --- reuse of memory ------------------------------------------------------------------------------------------------


def places(request: Infer) -> List[Tuple[int, int]]:
    regions = request.parameters.regions
    assert regions is not None
    return [
        *((place.offset, N) for place in regions.inputs),
        *((place.offset, place.nbytes) for place in regions.outputs),
    ]


def overlap(one: Infer, other: Infer) -> bool:
    return any(a < c + d and c < a + b for a, b in places(one) for c, d in places(other))


def test_reuses_memory_without_owner(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    assert {*places(session.infer(bytes_of(N))[1])} == {*places(session.infer(bytes_of(N))[1])}
    held, one = session.infer(bytes_of(N))
    view = held[10:20]
    del held
    _, other = session.infer(bytes_of(N, 9))
    assert places(one)[1] != places(other)[1]
    assert (view == 4).all()


def test_late_write_hits_no_other_tensor(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    call, late, _ = session.ask(bytes_of(N))
    session.receive(Error(late.id, "CANCELLED", "", may_still_write=True))
    with pytest.raises(Cancelled):
        call.result()
    del call
    y, request = session.infer(bytes_of(N))
    assert not overlap(late, request)
    session.write(late, bytes_of(N, 66))
    assert (y == 4).all()
    del y
    session.receive(Released(late.id))
    assert overlap(late, session.infer(bytes_of(N))[1])


def test_abandoned_request_keeps_its_memory(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    call, abandoned, _ = session.ask(bytes_of(N))
    del call
    gc.collect()
    assert not overlap(abandoned, session.infer(bytes_of(N))[1])
    session.answer(abandoned, bytes_of(N))
    assert overlap(abandoned, session.infer(bytes_of(N))[1])


def test_copies_answer_that_may_still_be_written(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    call, request, _ = session.ask(bytes_of(N))
    session.answer(request, bytes_of(N, 5), running=True)
    result: Any = call.result()
    session.write(request, bytes_of(N, 66))
    assert (result["y"] == 5).all()
    assert not overlap(request, session.infer(bytes_of(N))[1])


def test_new_connection_uses_new_regions(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    x = session.core.shm_tensors.arena.empty((N,), np.uint8)
    x[...] = 1
    _, late, _ = session.ask(bytes_of(N))
    before = list(session.core.shm_tensors.arena.regions)
    # The request was prepared for the lost connection and is sent over the next one.
    call, _ = session.core.prepare_infer("m", {"x": x}, 1.0)
    session.core.fail_all(Unavailable, "lost")
    session.core.shm_tensors.on_connected(can_share=True)
    again = session.core.frames_without_sharing(call)
    assert again is not None
    assert is_shared(decode(again, FROM_CLIENT)) == (False, False)  # type: ignore[arg-type]
    assert bytes(again[2]) == x.tobytes()
    session.sent.clear()
    outputs = [session.infer(x) for _ in range(3)]
    assert is_shared(outputs[-1][1])[1]
    session.write(late, bytes_of(N, 66))
    assert all((y == 2).all() for y, _ in outputs)
    assert [type(each) for each in session.sent] == [Register]
    assert not {*before} & {*session.core.shm_tensors.arena.regions}


def test_unregisters_region_without_requests(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    question = session.core.prepare_infer("m", {"x": bytes_of(N)}, 1.0)
    arena = session.core.shm_tensors.arena
    arena.before_fork()
    arena.after_fork(in_child=False)
    session.infer(bytes_of(N))
    assert Unregister not in map(type, session.sent)
    del question
    gc.collect()
    session.infer(bytes_of(N))
    assert [each.region for each in session.sent if isinstance(each, Unregister)] == ["r0"]


def test_unregisters_released_regions(session: SharedMemorySession) -> None:
    session.warm(bytes_of(N))
    gc.collect()
    session.warm(bytes_of(17 << 20))
    assert [type(each) for each in session.sent[:3]] == [Register, Unregister, Register]
    assert session.sent[1].region == "r0"
