"""The daemon's side towards its clients: their requests in, answers and errors out."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from weightd.daemon.clients.connections import peer_uid
from weightd.daemon.clients.doorman import Doorman
from weightd.daemon.clients.outbox import Outbox
from weightd.daemon.clients.peers import Peers
from weightd.daemon.clients.reader import Reader
from weightd.daemon.clients.room import Room
from weightd.daemon.clients.upkeep import Upkeep
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.sockets import Received
from weightd.daemon.models.fleet import Fleet
from weightd.daemon.models.model import Model
from weightd.daemon.requests.request import Request
from weightd.protocol import limits
from weightd.protocol.codec import Descriptions, clip, decode, encode
from weightd.protocol.errors import (
    Internal,
    InvalidArgument,
    LocalProtocolError,
    NotFound,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    ResourceExhausted,
    Unavailable,
)
from weightd.protocol.messages.children import Result
from weightd.protocol.messages.control import (
    ModelMetadata,
    ModelMetadataResponse,
    ModelReady,
    ReadyResponse,
    Reload,
    ReloadResponse,
    ServerMetadata,
    ServerMetadataResponse,
    ServerReady,
    Update,
    UpdateResponse,
)
from weightd.protocol.messages.data import Cancel, Error, Infer, InferResponse
from weightd.protocol.messages.regions import Register, Released, Unregister
from weightd.protocol.messages.status import Status, StatusResponse
from weightd.protocol.messages.types import FROM_CLIENT, ClientMessage, DaemonMessage
from weightd.protocol.version import EXTENSIONS, VERSION

_log = logging.getLogger("weightd.frontend")

# A guess: how long it takes until some of what is kept has been computed, or read.
_RETRY_S = 0.1

_FULL = "the daemon's memory for clients is full (max_memory_bytes), and this one, or its user, has most of it"


_ELSEWHERE = "memory can be shared on the unix socket alone"


class Daemon(Protocol):
    """What a client may ask of the daemon as a whole."""

    @property
    def stopping(self) -> bool:
        """Whether no new request is taken."""
        ...

    def ask_status(self, client: bytes, request_id: str) -> None:
        """Tell the client how everything stands, when that is known.

        Raises:
            RequestError: it will not be told.
        """

    def reload(self, request_id: str) -> ReloadResponse:
        """Read the configuration again, and return the answer.

        Raises:
            RequestError: nothing has changed.
        """
        ...


class Frontend:
    """Reads what clients send, gives it to the models, and sends what comes of it.

    Args:
        socket: on which clients connect.
        loop: calls when the socket is readable.
        fleet: the models.
        max_memory_bytes: that are kept for clients, see `Room`.
        daemon: is asked what no model knows.

    Attributes:
        room: what is kept for clients.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: Loop,
        fleet: Fleet,
        max_memory_bytes: int,
        daemon: Daemon,
    ) -> None:
        self._fleet = fleet
        self._daemon = daemon
        # A worker may still give an answer that the daemon before this one has asked for: no number is used twice.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._socket = socket
        self._reader = Reader(socket)
        self._descriptions = Descriptions()
        self._peers = Peers(socket)
        self.room = Room(max_memory_bytes, self._user)
        self._outbox = Outbox(socket, self.room, self._make_room)
        self._doorman = Doorman(self._peers)
        self._upkeep = Upkeep(self.room, self._outbox, self._peers)
        self._unrecorded: list[tuple[bytes, UpdateResponse]] = []
        loop.add(self._peers.monitor, self._on_connections)
        loop.add(self._socket, self._on_messages)
        loop.add_timer(self._doorman.timer)
        loop.add_timer(self._upkeep.timer)

    @property
    def dropped(self) -> int:
        """Answers that could not be sent: their client was gone, or did not read."""
        return self._outbox.dropped

    def answer(self, request: Request, result: Result, frames: Sequence[Any]) -> None:
        """Send the model's answer."""
        self.room.give(request.client, request.kept_bytes)
        self._tell(
            request.client,
            InferResponse(request.id, result.description, result.placed, request.running or None),
            frames,
        )

    def refuse(self, request: Request, error: RequestError) -> None:
        """Send an error in the place of an answer."""
        self.room.give(request.client, request.kept_bytes)
        self.tell_error(request.client, request.id, error, running=request.running)

    def released(self, request: Request) -> None:
        """Tell a client that nobody writes any more where the outputs of its request were to be."""
        self._tell(request.client, Released(request.id))

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata."""
        self._tell(client, metadata)

    def tell_status(self, client: bytes, status: StatusResponse) -> None:
        """Send the answer to a status request."""
        self._tell(client, status, max_bytes=limits.MAX_STATUS_BYTES)

    def tell_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Tell the client that an update has taken over, as soon as that is recorded."""
        self._unrecorded.append((client, response))

    def tell_recorded(self) -> None:
        """Tell what was not to be told before it was recorded."""
        while self._unrecorded:
            self._tell(*self._unrecorded.pop(0))

    def tell_error(self, client: bytes, request_id: str, error: RequestError, *, running: bool = False) -> None:
        """Send an error."""
        after = None if error.retry_after is None else int(min(1e6 * error.retry_after, limits.MAX_TIMEOUT_US))
        self._tell(client, Error(request_id, error.code, clip(str(error)), after, running or None))

    # --- within -------------------------------------------------------------------------------------------------

    def _on_messages(self) -> None:
        for received in self._reader.read():
            now = time.monotonic()
            self._peers.seen(received, now)
            self._upkeep.seen(now)
            if self._reader.has_rest:
                self._hang_up(received.peer, "a message of more frames than there may be")
                continue
            request_id = ""
            try:
                message = decode(received.frames, FROM_CLIENT, self._descriptions)
                request_id = message.id
                self._serve(received, message, now)
            except RemoteProtocolError as error:
                self.tell_error(received.peer, error.request_id, InvalidArgument(str(error)))
            except RequestError as error:
                self.tell_error(received.peer, request_id, error)
        if self._peers.pending:
            self._on_connections()

    def _serve(self, received: Received, message: ClientMessage, now: float) -> None:
        client = received.peer
        match message:
            case Infer():
                self._infer(received, message, now)
            case ModelMetadata():
                self._model(message.model_name).metadata(client, message.id)
            case ServerMetadata():
                self._tell(
                    client,
                    ServerMetadataResponse(message.id, "weightd", VERSION, tuple(self._fleet.models), EXTENSIONS),
                )
            case Cancel():
                for each in self._fleet.everyone():
                    each.cancel(client, message.id, now)
            case Register() | Unregister():
                raise InvalidArgument(_ELSEWHERE)
            case ServerReady() | ModelReady():
                self._tell_ready(client, message, now)
            case Status():
                self._daemon.ask_status(client, message.id)
            case Update() | Reload():
                self._operate(received, message, now)

    def _tell_ready(self, client: bytes, message: ServerReady | ModelReady, now: float) -> None:
        models = list(self._fleet.models.values())
        if isinstance(message, ModelReady):
            models = [self._model(message.model_name)]
        reasons = (
            ["weightd is stopping"] if self._daemon.stopping else [why for each in models if (why := each.unready(now))]
        )
        self._tell(client, ReadyResponse(message.id, not reasons, clip("; ".join(reasons))))

    def _operate(self, received: Received, message: Update | Reload, now: float) -> None:
        if isinstance(message, Update):
            self._update(received, message, now)
        else:
            _check_operator(received, "reload the configuration")
            self._tell(received.peer, self._daemon.reload(message.id))

    def _update(self, received: Received, message: Update, now: float) -> None:
        _check_operator(received, "update a model")
        if message.rollback == bool(message.path or message.weights):
            raise InvalidArgument("expected a path, weights, or rollback alone")
        for path in (message.path, message.weights):
            if path and (not Path(path).is_absolute() or "\0" in path):
                raise InvalidArgument(f"expected an absolute path on the daemon's host, got {path!r}")
        model = self._model(message.model_name)
        if self._daemon.stopping:
            raise Unavailable("weightd is stopping")
        model.update(
            received.peer, message.id, now, path=message.path, weights=message.weights, rollback=message.rollback
        )

    def _infer(self, received: Received, message: Infer, now: float) -> None:
        client, tensors = received.peer, received.frames[limits.MAX_HEADER_FRAMES :]
        if message.parameters.regions is not None:
            raise InvalidArgument(f"parameters.regions: {_ELSEWHERE}")
        model = self._model(message.description.model_name)
        if self._daemon.stopping:
            raise Unavailable("weightd is stopping")
        timeout = message.parameters.timeout
        seconds = model.config.timeout if timeout is None else timeout / 1e6
        request = Request(
            number=next(self._numbers),
            client=client,
            id=message.id,
            description=message.description,
            frames=tensors,
            arrived=now,
            deadline=now + seconds,
            nbytes=sum(map(len, tensors)),
            origin=self._peers.origin(client),
        )
        kept_bytes = request.kept_bytes
        if not self.room.fits(kept_bytes) and not self._make_room(client, kept_bytes):
            raise ResourceExhausted(_FULL, retry_after=_RETRY_S)
        self.room.take(client, kept_bytes)
        try:
            model.infer(request, now)
        except RequestError:
            self.room.give(client, kept_bytes)
            raise

    # --- memory -------------------------------------------------------------------------------------------------

    def _user(self, client: bytes) -> str:
        connection = self._peers.connection(client)
        return "" if connection is None else connection.user

    def _make_room(self, client: bytes, nbytes: int) -> bool:
        """Return whether there is room for so much more of a client, after those that have more have given theirs."""
        self._outbox.forget_written()
        while not self.room.fits(nbytes):
            largest = self.room.largest(client, nbytes)
            if largest == client:
                return False
            held = self.room.of(largest)
            unread = self._outbox.unread(largest)
            if 2 * unread < held:
                for model in self._fleet.everyone():
                    model.shed(largest, ResourceExhausted(_FULL, retry_after=_RETRY_S), time.monotonic())
            if self.room.of(largest) == held:
                self._hang_up(largest, f"{held // 2**20} MiB are kept for it, {unread // 2**20} of them not read")
                self._forget(largest)
        return True

    def _hang_up(self, client: bytes, why: str) -> None:
        connection = self._peers.connection(client)
        if connection is not None and not connection.leaving:
            _log.warning("client %s (%s) is hung up: %s", client.hex(), connection.user, why)
            connection.hang_up()

    def _forget(self, client: bytes) -> None:
        self._outbox.forget(client)
        self.room.forget(client)

    def _on_connections(self) -> None:
        for client in self._peers.disconnected():
            for model in self._fleet.everyone():
                model.vanished(client, time.monotonic())
            self._forget(client)
        self._upkeep.seen(time.monotonic())
        self._doorman.look()

    def _model(self, name: str) -> Model:
        try:
            return self._fleet.models[name]
        except KeyError:
            raise NotFound(f"no model {name!r}; there are: {', '.join(self._fleet.models)}") from None

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
        if not self._outbox.send(client, [*header, *frames]):
            refusal = ResourceExhausted("the answer is dropped: earlier ones wait to be read by this client")
            header = encode(Error(message.id, refusal.code, str(refusal)))
            self._outbox.send(client, header)


def _check_operator(received: Received, what: str) -> None:
    if peer_uid(received.identity) not in (os.getuid(), 0):
        raise PermissionDenied(f"only the user that weightd runs as, and root, may {what}")
