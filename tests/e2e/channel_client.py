"""A client of direct channels that sends each packet itself, so that a test decides which way each request takes."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.waiting import LIMIT_S, until
from weightd_common import endpoints
from weightd_common.stream import Stream
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import FrameReader, message_prefix
from weightd_protocol.messages.channels import ChannelOpened, OpenChannel, pack_deadline
from weightd_protocol.messages.inference import Error, Infer, InferResponse, RequestDescription, TensorSpec
from weightd_protocol.messages.types import TO_CLIENT, DaemonMessage
from weightd_protocol.tensors import from_frame

_DATATYPES = {np.dtype(np.float32): "FP32", np.dtype(np.int64): "INT64"}


class ChannelClient:
    """A connection to a daemon, and one direct channel to a model, whose workers know the description of `inputs`.

    Attributes:
        channel: the client's end of the channel.
        opened: the message with which the daemon has opened it.
        notices: the messages of the daemon that are no answers.
    """

    def __init__(self, address: str, model: str, **inputs: NDArray[Any]) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(endpoints.unix_path(f"ipc://{address.removeprefix('unix://')}"))
        self._stream = Stream(connection, accepts_descriptors=True)
        self._model = model
        self._number = 10**6
        self._answers: dict[str, tuple[DaemonMessage, list[Any]]] = {}
        self.notices: deque[DaemonMessage] = deque()
        assert isinstance(self.answer(self.relay(**inputs)), dict)
        self._send(encode(OpenChannel("0", model)))
        self.opened = self.wait_for(ChannelOpened)
        self.channel = socket.socket(fileno=self._stream.descriptors.popleft())
        # The daemon lets workers run a description once it has answered a request with it since the channel was opened.
        assert isinstance(self.answer(self.relay(**inputs)), dict)

    def __enter__(self) -> ChannelClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and the channel."""
        self._stream.close()
        self.channel.close()

    def relay(self, **inputs: NDArray[Any]) -> str:
        """Send a request to the daemon; return its id."""
        name, frames = self._request(inputs)
        self._send(frames)
        return name

    def send(self, timeout: float = LIMIT_S, **inputs: NDArray[Any]) -> str:
        """Send a request on the channel; return its id."""
        name, frames = self._request(inputs)
        deadline = pack_deadline(int((time.monotonic() + timeout) * 1e6))
        self.channel.send(deadline + message_prefix(frames) + b"".join(map(bytes, frames)))
        return name

    def refused_channel(self) -> Error:
        """Ask for another channel, which the daemon refuses."""
        self._send(encode(OpenChannel("1", self._model)))
        answer = self.answer("1")
        assert isinstance(answer, Error), answer
        return answer

    def answer(self, name: str) -> dict[str, NDArray[Any]] | Error:
        """Wait for the answer to a request, over the channel or from the daemon."""
        until(lambda: self.has_answer(name), f"an answer to {name}")
        message, frames = self._answers.pop(name)
        if isinstance(message, Error):
            return message
        assert isinstance(message, InferResponse)
        return {
            spec.name: from_frame(spec, frame) for spec, frame in zip(message.description.outputs, frames, strict=True)
        }

    def output(self, name: str) -> Any:
        """Wait for the answer to a request; return the output `y` as lists of numbers."""
        answer = self.answer(name)
        assert isinstance(answer, dict), answer
        return answer["y"].tolist()

    def has_answer(self, name: str) -> bool:
        """Return whether the answer to a request has arrived."""
        self._read()
        return name in self._answers

    def wait_for(self, kind: type[Any]) -> Any:
        """Wait for a notice of a type; return it."""

        def find() -> Any:
            self._read()
            assert not any(isinstance(each, Error) for each in self.notices), self.notices
            return next((each for each in self.notices if isinstance(each, kind)), None)

        found = until(find, kind.__name__)
        self.notices.remove(found)
        return found

    def _request(self, inputs: dict[str, NDArray[Any]]) -> tuple[str, list[Any]]:
        self._number += 1
        specs = tuple(TensorSpec(name, _DATATYPES[each.dtype], each.shape) for name, each in inputs.items())
        infer = Infer(str(self._number), RequestDescription(self._model, specs))
        return infer.id, [*encode(infer), *(each.tobytes() for each in inputs.values())]

    def _send(self, frames: list[Any]) -> None:
        assert self._stream.send(frames)

    def _read(self) -> None:
        """Read everything that has arrived; wait a moment if nothing has."""
        sources: list[Any] = [self._stream] if not hasattr(self, "channel") else [self._stream, self.channel]
        ready, _, _ = select.select(sources, [], [], 0.05)
        messages: list[Any] = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self._stream in ready:
                messages += self._stream.receive()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if len(ready) > (self._stream in ready):
                messages += FrameReader().receive(self.channel.recv(1 << 18))
        for each in messages:
            message = decode(each.frames, TO_CLIENT)
            if isinstance(message, (InferResponse, Error)) and message.id != "0":
                assert message.id not in self._answers, f"{message.id} is answered twice"
                self._answers[message.id] = message, list(each.frames[2:])
            else:
                self.notices.append(message)
