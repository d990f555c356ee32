"""What a client knows of its requests, without a socket: bytes out, bytes in, answers by id."""

from __future__ import annotations

import itertools
import os
from typing import Any, Dict, List, Mapping, Sequence, Tuple, Union

from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, RemoteProtocolError, request_error
from weightd.protocol.messages import (
    TO_CLIENT,
    Error,
    Infer,
    InferResponse,
    ModelMetadata,
    ModelMetadataResponse,
    Parameters,
    ServerMetadata,
    ServerMetadataResponse,
    Status,
    StatusResponse,
)
from weightd.protocol.tensors import frame_of, from_frame, spec_of, to_wire
from weightd.protocol.wire import decode, encode

Answer = Union[Dict[str, Any], ModelMetadataResponse, ServerMetadataResponse, StatusResponse]


class ClientCore:
    """Makes requests and matches answers to them."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        # Not a secret, only a help to tell clients apart in logs.
        self._prefix = f"{os.getpid()}-"
        self._waiting: Dict[str, "Answer | Exception | None"] = {}

    def infer(self, model: str, inputs: Mapping[str, Any], timeout: float) -> Tuple[str, List[Any]]:
        """Return id and frames of an inference request.

        Raises:
            InvalidArgument: an array has no datatype on the wire.
        """
        arrays: List[Any] = []
        specs: List[Any] = []
        for name, value in inputs.items():
            try:
                array = to_wire(value)
            except InvalidArgument as error:
                raise InvalidArgument(f"input {name}: {error}") from None
            arrays.append(array)
            specs.append(spec_of(name, array))
        request_id = self._next_id()
        microseconds = min(max(1, int(timeout * 1e6)), limits.MAX_TIMEOUT_US)
        header = encode(Infer(request_id, model, tuple(specs), Parameters(microseconds)))
        return self._sent(request_id, [header, *map(frame_of, arrays)])

    def model_metadata(self, model: str) -> Tuple[str, List[Any]]:
        """Return id and frames of a question about a model."""
        request_id = self._next_id()
        return self._sent(request_id, [encode(ModelMetadata(request_id, model))])

    def server_metadata(self) -> Tuple[str, List[Any]]:
        """Return id and frames of a question about the server."""
        request_id = self._next_id()
        return self._sent(request_id, [encode(ServerMetadata(request_id))])

    def status(self) -> Tuple[str, List[Any]]:
        """Return id and frames of a question about everything."""
        request_id = self._next_id()
        return self._sent(request_id, [encode(Status(request_id))])

    def received(self, frames: Sequence[Any]) -> None:
        """Take in a message. An answer that nobody waits for (any more) is dropped.

        Raises:
            RemoteProtocolError: the daemon broke the protocol, or refuses a request it could not read.
        """
        message = decode(frames, TO_CLIENT, max_bytes=limits.MAX_STATUS_BYTES)
        if isinstance(message, Error) and not message.id:
            raise RemoteProtocolError(f"the daemon could not read a request: {message.error}")
        if message.id not in self._waiting:
            return
        if isinstance(message, Error):
            self._waiting[message.id] = request_error(message.code, message.error)
        elif isinstance(message, InferResponse):
            self._waiting[message.id] = {
                spec.name: from_frame(spec, frame) for spec, frame in zip(message.outputs, frames[1:])
            }
        else:
            self._waiting[message.id] = message

    def answered(self, request_id: str) -> bool:
        """Whether the answer is there."""
        return self._waiting[request_id] is not None

    def take(self, request_id: str) -> Answer:
        """Return the answer, once.

        Raises:
            RequestError: the request ended in an error.
        """
        answer = self._waiting.pop(request_id)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None, "take() before answered()"
        return answer

    def forget(self, request_id: str) -> None:
        """Wait for this answer no longer."""
        self._waiting.pop(request_id, None)

    def fail_all(self, error: Exception) -> None:
        """End every request that waits with `error`."""
        for request_id, answer in self._waiting.items():
            if answer is None:
                self._waiting[request_id] = error

    def _next_id(self) -> str:
        return f"{self._prefix}{next(self._ids)}"

    def _sent(self, request_id: str, frames: List[Any]) -> Tuple[str, List[Any]]:
        self._waiting[request_id] = None
        return request_id, frames
