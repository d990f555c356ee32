"""The daemon's and the client's ends of a worker's direct channels, over real sockets and pages."""

from __future__ import annotations

import collections
import hashlib
import mmap
import os
import select
import socket
import time
from typing import Any, Deque, Dict, List, Optional, Sequence, Set, Tuple, cast

import numpy as np

from testkit.fakeengine import FakeEngine
from weightd_common import memfd
from weightd_common.channels.pages import (
    BYTE_LIMIT,
    DEVICE_BYTES,
    DEVICE_LAYOUT,
    EXPIRES_AT,
    GENERATION,
    OUTCOMES,
    REQUEST_LIMIT,
    SERIAL,
    SLOT_OPEN,
    STATE,
    TENANT,
    WEIGHT,
    daemon_page,
    row_page,
)
from weightd_common.stream import refuse_descriptors
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.description_cache import DescriptionCache
from weightd_protocol.framing import FrameReader, message_prefix
from weightd_protocol.messages.channels import (
    AddChannel,
    AllowRequests,
    SetChannelRows,
    pack_deadline,
)
from weightd_protocol.messages.inference import (
    Infer,
    InferResponse,
    Parameters,
    RequestDescription,
    TensorSignature,
    TensorSpec,
)
from weightd_protocol.messages.types import TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD
from weightd_worker import exit_codes
from weightd_worker.channels.direct import DirectChannels
from weightd_worker.engines.engine import Arrays, ModelSignature
from weightd_worker.predictor import Predictor

GENERATION_SERIAL = 3
LIMIT_S = 20.0
SIGNATURE = ModelSignature((TensorSignature("x", "FP32", (-1,)),), (TensorSignature("y", "FP32", None),))
HOUR_US = 3_600_000_000
PARAMETERS = Parameters(timeout_us=HOUR_US)
DESCRIPTION = RequestDescription("m", (TensorSpec("x", "FP32", (4,)),))


def now_us() -> int:
    return int(time.monotonic() * 1e6)


def packet_of(frames: Sequence[Any], deadline_us: Optional[int] = None) -> bytes:
    deadline = now_us() + HOUR_US if deadline_us is None else deadline_us
    return pack_deadline(deadline) + message_prefix(frames) + b"".join(frames)


def request(
    number: object,
    *values: float,
    parameters: Parameters = PARAMETERS,
    deadline_us: Optional[int] = None,
    description: RequestDescription = DESCRIPTION,
) -> bytes:
    """Return the packet of a request with one input `x`."""
    tensor = np.array(values or (1, 2, 3, 4), np.float32).tobytes()
    return packet_of([*encode(Infer(str(number), description, parameters)), tensor], deadline_us)


def digest_of(description: RequestDescription) -> str:
    return hashlib.sha256(encode(Infer("1", description))[1]).hexdigest()


class FakeConnection:
    """The connection to a daemon, which records the messages of the worker."""

    def __init__(self) -> None:
        self.descriptors: Deque[int] = collections.deque()
        self.watched: Set[int] = set()
        self.sent: List[Tuple[Any, List[bytes]]] = []
        self.has_daemon = True
        self.is_full = False

    def take_descriptor(self) -> int:
        return self.descriptors.popleft()

    def watch(self, descriptor: int) -> None:
        self.watched.add(descriptor)

    def unwatch(self, descriptor: int) -> None:
        self.watched.remove(descriptor)

    def has_room(self, nbytes: int) -> bool:
        return not self.is_full

    def reply(self, *messages: Sequence[Any]) -> bool:
        for frames in messages:
            if self.has_daemon:
                self.sent.append((decode(frames, FROM_CHILD), [bytes(each) for each in frames[1:]]))
        return self.has_daemon


class Device:
    """The daemon's side: the pages of a device, and the channels of its clients."""

    def __init__(self) -> None:
        self.descriptor = memfd.create(DEVICE_BYTES)
        self.memory = memoryview(mmap.mmap(self.descriptor, DEVICE_BYTES))
        self.page = daemon_page(self.memory)
        self.page.reals[DEVICE_LAYOUT.tenant(0) + WEIGHT] = 1.0
        self.ends: Dict[int, socket.socket] = {}
        self.clients: List[socket.socket] = []

    def open(
        self,
        slot: int = 0,
        serial: int = 11,
        requests: int = 1000,
        nbytes: int = 10**9,
        *,
        refuses_descriptors: bool = True,
    ) -> Client:
        """Open a channel; return its client. Linux before 6.16 cannot refuse descriptors."""
        words, index = self.page.words, DEVICE_LAYOUT.channel(slot)
        words[index + GENERATION], words[index + TENANT], words[index + SERIAL] = GENERATION_SERIAL, 0, serial
        words[index + REQUEST_LIMIT], words[index + BYTE_LIMIT] = requests, nbytes
        self.page.reals[index + EXPIRES_AT] = time.monotonic() + 3600
        words[index + STATE] = SLOT_OPEN
        client, self.ends[serial] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if refuses_descriptors:
            refuse_descriptors(self.ends[serial])
        client.settimeout(LIMIT_S)
        self.clients.append(client)
        return Client(client, slot, serial)

    def row(self, row: int = 0) -> Any:
        return row_page(self.memory, row)

    def count(self, what: int, slot: int = 0, row: int = 0) -> Any:
        return self.row(row).words[DEVICE_LAYOUT.row_channel(slot) + what]

    def ended(self, slot: int = 0, row: int = 0) -> int:
        """Return the number of requests that have ended."""
        return sum(self.count(outcome, slot, row) for outcome in OUTCOMES)

    def close(self) -> None:
        os.close(self.descriptor)
        for each in (*self.ends.values(), *self.clients):
            each.close()


class Client:
    """A client's end of a channel."""

    def __init__(self, end: socket.socket, slot: int, serial: int) -> None:
        self.end = end
        self.slot = slot
        self.serial = serial

    def send(self, packet: bytes) -> None:
        self.end.send(packet)

    def receive(self) -> Tuple[Any, List[Any]]:
        """Return the next answer and its tensors."""
        [message] = FrameReader().receive(self.end.recv(2 * limits.MAX_PACKET_BYTES))
        return decode(message.frames, TO_CLIENT), list(message.frames[2:])

    def answer(self) -> Tuple[str, List[float]]:
        """Return the id and the output of the next answer."""
        response, tensors = self.receive()
        assert isinstance(response, InferResponse), response
        return response.id, [*np.frombuffer(tensors[0], np.float32)]

    def has_answer(self) -> bool:
        readable, _, _ = select.select([self.end], [], [], 0)
        return bool(readable)


class Worker:
    """A worker of the device whose model doubles its input."""

    def __init__(self, device: Device, row: int = 0, rows: int = 1) -> None:
        self.device = device
        self.engine = FakeEngine(self.run, SIGNATURE)
        self.connection = FakeConnection()
        self.error: Optional[Exception] = None
        self.output: Any = None
        predictor = Predictor(self.engine, self.to_daemon)
        self.channels = DirectChannels(cast(Any, self.connection), predictor.predict, DescriptionCache())
        self.connection.descriptors.append(os.dup(device.descriptor))
        self.channels.on_order(SetChannelRows(GENERATION_SERIAL, row, rows, tuple(range(rows))))

    def to_daemon(self, *replies: Any) -> None:
        raise AssertionError("a reply to a request on a channel was sent to the daemon")

    def run(self, inputs: Arrays) -> Arrays:
        if self.error is not None:
            raise self.error
        return {"y": inputs["x"] * 2 if self.output is None else self.output}

    def add(self, client: Client, *descriptions: RequestDescription) -> None:
        """Send the worker a channel on which requests with these descriptions may run."""
        self.connection.descriptors.append(os.dup(self.device.ends[client.serial].fileno()))
        self.channels.on_order(AddChannel(client.slot, client.serial))
        for each in descriptions or (DESCRIPTION,):
            self.channels.on_order(AllowRequests(client.serial, digest_of(each)))

    def readable(self) -> List[int]:
        if not self.connection.watched:
            return []
        return select.select(sorted(self.connection.watched), [], [], 0)[0]

    def serve(self) -> int:
        """Process requests until no channel is readable; return the first status that is not OK."""
        while True:
            ready = self.readable()
            if not ready:
                return exit_codes.OK
            status = self.channels.serve(ready)
            if status != exit_codes.OK:
                return status

    @property
    def sent(self) -> List[Any]:
        return [message for message, _ in self.connection.sent]
