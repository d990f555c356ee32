"""The daemon's side towards its clients: their requests in, answers and errors out."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from weightd.daemon.loop import Loop
from weightd.daemon.model import Model
from weightd.daemon.scheduler import Request
from weightd.daemon.sockets import Received, bind, peer_uid, receive, send
from weightd.protocol import limits
from weightd.protocol.errors import (
    Internal,
    InvalidArgument,
    LocalProtocolError,
    NotFound,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    Unavailable,
)
from weightd.protocol.messages import (
    FROM_CLIENT,
    ClientMessage,
    DaemonMessage,
    Error,
    Infer,
    InferResponse,
    ModelMetadata,
    ModelMetadataResponse,
    ServerMetadata,
    ServerMetadataResponse,
    Status,
    StatusResponse,
    TensorSpec,
    Update,
    UpdateResponse,
)
from weightd.protocol.version import VERSION
from weightd.protocol.wire import clip, decode, encode

_log = logging.getLogger("weightd.frontend")


class Frontend:
    """Reads what clients send, gives it to the models, and sends what comes of it.

    Args:
        context: for the socket.
        address: where to listen.
        loop: calls when the socket is readable.
        models: by name.
        ask_status: called with client and request id of each status request; it may raise a RequestError.

    Attributes:
        stopping: whether new inference requests are refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        loop: Loop,
        models: Mapping[str, Model],
        ask_status: Callable[[bytes, str], None],
    ) -> None:
        self.stopping = False
        self._models = models
        self._ask_status = ask_status
        self._numbers = itertools.count(1)
        self._socket = bind(context, address, clients=True)
        loop.add(self._socket, self._on_messages)

    def answer(self, request: Request, outputs: Sequence[TensorSpec], frames: Sequence[Any]) -> None:
        """Send the model's answer."""
        self._tell(request.client, InferResponse(request.id, request.model_name, tuple(outputs)), frames)

    def refuse(self, request: Request, error: RequestError) -> None:
        """Send an error in the place of an answer."""
        self.tell_error(request.client, request.id, error)

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata."""
        self._tell(client, metadata)

    def tell_status(self, client: bytes, status: StatusResponse) -> None:
        """Send the answer to a status request."""
        self._tell(client, status, max_bytes=limits.MAX_STATUS_BYTES)

    def tell_updated(self, client: bytes, request_id: str, model_name: str, generations: Sequence[int]) -> None:
        """Tell the client that an update has taken over."""
        self._tell(client, UpdateResponse(request_id, model_name, tuple(generations)))

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error."""
        self._tell(client, Error(request_id, error.code, clip(str(error))))

    # --- within -------------------------------------------------------------------------------------------------

    def _on_messages(self) -> None:
        now = time.monotonic()
        for received in receive(self._socket):
            request_id = ""
            try:
                message = decode(received.frames, FROM_CLIENT)
                request_id = message.id
                self._serve(received, message, now)
            except RemoteProtocolError as error:
                self.tell_error(received.peer, error.request_id, InvalidArgument(str(error)))
            except RequestError as error:
                self.tell_error(received.peer, request_id, error)

    def _serve(self, received: Received, message: ClientMessage, now: float) -> None:
        client = received.peer
        match message:
            case Infer():
                self._infer(client, message, received.frames[1:], now)
            case ModelMetadata():
                self._model(message.model_name).metadata(client, message.id)
            case ServerMetadata():
                self._tell(client, ServerMetadataResponse(message.id, "weightd", VERSION, tuple(self._models)))
            case Status():
                self._ask_status(client, message.id)
            case Update():
                self._update(received, message, now)

    def _update(self, received: Received, message: Update, now: float) -> None:
        if peer_uid(received.identity) not in (os.getuid(), 0):
            raise PermissionDenied("only the user that weightd runs as, and root, may update a model")
        if message.rollback == bool(message.path or message.weights):
            raise InvalidArgument("expected a path, weights, or rollback alone")
        for path in (message.path, message.weights):
            if path and (not Path(path).is_absolute() or "\0" in path):
                raise InvalidArgument(f"expected an absolute path on the daemon's host, got {path!r}")
        model = self._model(message.model_name)
        if self.stopping:
            raise Unavailable("weightd is stopping")
        model.update(
            received.peer, message.id, now, path=message.path, weights=message.weights, rollback=message.rollback
        )

    def _infer(self, client: bytes, message: Infer, tensors: Sequence[Any], now: float) -> None:
        model = self._model(message.model_name)
        if self.stopping:
            raise Unavailable("weightd is stopping")
        timeout = message.parameters.timeout
        seconds = model.config.timeout if timeout is None else timeout / 1e6
        model.infer(
            Request(
                number=next(self._numbers),
                client=client,
                id=message.id,
                model_name=model.name,
                inputs=message.inputs,
                frames=tensors,
                arrived=now,
                deadline=now + seconds,
                nbytes=sum(map(len, tensors)),
            )
        )

    def _model(self, name: str) -> Model:
        try:
            return self._models[name]
        except KeyError:
            raise NotFound(f"no model {name!r}; there are: {', '.join(self._models)}") from None

    def _tell(
        self,
        client: bytes,
        message: DaemonMessage,
        frames: Sequence[Any] = (),
        max_bytes: int = limits.MAX_HEADER_BYTES,
    ) -> None:
        try:
            header = encode(message, max_bytes=max_bytes)
        except LocalProtocolError as error:
            # What an engine or a path says may not fit into a header: that is an answer too.
            header, frames = encode(Error(message.id, Internal.code, clip(f"the answer cannot be sent: {error}"))), ()
        if not send(self._socket, client, [header, *frames]):
            _log.debug("client %s is gone: its answer is dropped", client.hex())
