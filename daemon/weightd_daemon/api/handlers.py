"""The daemon's side towards its clients: their requests in, answers and errors out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weightd_daemon.api.authorization import RIGHT_REVOKED, Authorizer, check_infer
from weightd_daemon.api.connection import ClientConnection, ClientIdentity
from weightd_daemon.api.heap_trim import HeapTrimmer
from weightd_daemon.api.memory_budget import MemoryBudget
from weightd_daemon.api.region_registry import RegionRegistry
from weightd_daemon.api.server import ClientConnections, ConnectionCallbacks
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform import audit, clock
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_admission import ConnectionAdmission, UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.scheduling.metadata import MetadataRequest
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS
from weightd_daemon.tenants.tenant import Tenant, Viewer
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded
from weightd_protocol import limits, preview
from weightd_protocol.codec import Decoder, clip, encode, heading, max_request_items
from weightd_protocol.errors import (
    Internal,
    InvalidArgument,
    LocalProtocolError,
    NotFound,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from weightd_protocol.framing import Message
from weightd_protocol.messages.control import (
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
from weightd_protocol.messages.events import Events, EventsResponse, Logs, LogsResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer, InferResponse
from weightd_protocol.messages.metrics import Metrics, MetricsResponse
from weightd_protocol.messages.regions import Register, Registered, Released, Unregister
from weightd_protocol.messages.status import Status, StatusResponse
from weightd_protocol.messages.types import FROM_CLIENT, MESSAGES_WITHOUT_REPLY, DaemonMessage
from weightd_protocol.messages.worker import PredictResult
from weightd_protocol.version import EXTENSIONS, VERSION

# Of the frames of a message.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

# A guess: how long it takes until some of what is kept has been computed, or read.
_RETRY_AFTER_S = 0.1

_MEMORY_FULL = (
    "the daemon's memory budget for clients is used up (max_memory_bytes), and this one, or its user, has most of it"
)

_UNIX_SOCKET_ONLY = "memory can be shared on the unix socket alone"

_MESSAGE_TYPES = {kind: name for name, kind in FROM_CLIENT.items()}

# Who has sent it, the message, all its frames, and when that was.
MessageHandler = Callable[[ClientConnection, Any, Sequence[Any], float], None]


class DaemonControl(Protocol):
    """What a client may ask of the daemon as a whole."""

    @property
    def is_stopping(self) -> bool:
        """Whether no new request is taken."""
        ...

    def report_status(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Tell a client how everything stands, when that is known.

        Raises:
            RequestError: the client will not be told.
        """

    def report_metrics(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Tell a client what was counted; raises as `report_status`."""

    def report_events(self, requester: MetadataRequest, request: Events) -> None:
        """Tell a client what has happened; raises as `report_status`."""

    def report_logs(self, client: bytes, request: Logs) -> None:
        """Tell the client what the processes of a model have said, when that has been read.

        Raises:
            RequestError: it will not be told.
        """

    def unmap(self, numbers: Sequence[int]) -> None:
        """Take regions away from the workers that were given them: no client names them any more."""

    def reload(self, client: bytes, request_id: str) -> None:
        """Read the configuration again, and tell the client how that has ended.

        Raises:
            RequestError: nothing has changed.
        """


class RequestRouter:
    """Reads what clients send, gives it to the models, and sends what comes of it.

    Args:
        loop: calls when there is something to do.
        model_registry: the models.
        max_memory_bytes: that are kept for clients, see `MemoryBudget`.
        max_shm_bytes: of the regions of one user.
        user_limits: of the connections of one user to the Unix socket.
        daemon: is asked what no model knows.
        authorizer: tells who is who, may what, and on which account that goes.
        log: of what clients do.

    Attributes:
        memory_budget: what is kept for clients.
        regions: the memory that they have registered.
    """

    def __init__(  # noqa: PLR0913
        self,
        loop: EventLoop,
        model_registry: ModelRegistry,
        max_memory_bytes: int,
        daemon: DaemonControl,
        *,
        max_shm_bytes: int,
        user_limits: UserConnectionLimits,
        authorizer: Authorizer,
        log: ClientLog | None = None,
    ) -> None:
        self._model_registry = model_registry
        self._daemon = daemon
        self._authorizer = authorizer
        self._accounts = authorizer.accounts
        # A worker may still give an answer that the daemon before this one has asked for: no number is used twice.
        self._request_numbers = itertools.count(time.time_ns() // 1000)
        self._decoder = Decoder(FROM_CLIENT, max_items_for=self._max_description_items)
        self.memory_budget = MemoryBudget(
            max_memory_bytes, self._user_of, lambda: self._heap_trimmer.on_large_message(clock.now())
        )
        self.regions = RegionRegistry(
            max_shm_bytes, self._user_of, functools.partial(loop.call_soon, self._unmap_closed)
        )
        self._heap_trimmer = HeapTrimmer(self.memory_budget)
        callbacks = ConnectionCallbacks(
            self._free_memory,
            self._authorizer.limit_account_of,
            self._authorizer.assign_tenant,
            self._on_message,
            self._on_disconnecting,
            self._on_disconnected,
        )
        self._connections = ClientConnections(
            loop, self.memory_budget, ConnectionAdmission(user_limits), callbacks, log
        )
        self._unsaved_responses: list[tuple[bytes, UpdateResponse]] = []
        self._audit_refusals = audit.RefusalLog()
        # What was begun for a client, by the client and the id of its message.
        self._pending_operations: dict[tuple[bytes, str], audit.AuditEntry] = {}
        self._handlers: dict[type[Any], MessageHandler] = {
            Infer: self._on_infer,
            ModelMetadata: self._on_model_metadata,
            ServerMetadata: self._on_server_metadata,
            Cancel: self._on_cancel,
            Register: self._on_register,
            Unregister: self._on_unregister,
            ServerReady: self._on_ready,
            ModelReady: self._on_ready,
            Status: self._on_status,
            Metrics: self._on_metrics,
            Events: self._on_events,
            Logs: self._on_logs,
            Update: self._on_update,
            Reload: self._on_reload,
        }
        loop.add_timer(self._heap_trimmer.timer)

    @property
    def dropped_responses(self) -> int:
        """Answers that could not be sent: their client was gone, or did not read."""
        return self._connections.dropped_messages

    def listen(self, listener: socket.socket) -> None:
        """Let clients connect to a unix socket, which listens and does not block."""
        self._connections.listen(listener)

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Serve a client that has come by another way; the socket is this object's from now on."""
        self._connections.adopt(connection, identity)

    def on_tenants_changed(self) -> None:
        """The tables of tenants have changed: what waits of who may not ask for it any more ends."""
        previous_tenants = {each.key: each.tenant for each in self._connections}
        self._connections.reassign_tenants()
        is_revoked = self._authorizer.revocation_filter(self._connections.get, previous_tenants)
        for model in self._model_registry.all_models():
            model.shed(is_revoked, PermissionDenied(RIGHT_REVOKED), clock.now())
            model.reject_metadata_requests(
                functools.partial(self._is_model_hidden, model.name), PermissionDenied(RIGHT_REVOKED)
            )

    def _is_model_hidden(self, model: str, client: bytes) -> bool:
        connection = self._connections.get(client)
        return (
            connection is None
            or connection.tenant is None
            or not self._authorizer.resolve_viewer(connection).tenant.can_see(model)
        )

    def close(self) -> None:
        """Let all clients go."""
        self._connections.close()

    def cork(self) -> None:
        """Keep small messages to clients back until the end of this turn: several are to come at once."""
        self._connections.cork()

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Send the model's answer."""
        request.usage.count_served(sum(map(len, frames)))
        self._on_request_end(request)
        self._send(
            request.client,
            InferResponse(request.id, result.description, result.shared_outputs, request.may_still_write or None),
            frames,
        )

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Send an error in the place of an answer."""
        request.usage.count_failed(error)
        self._on_request_end(request)
        self.reply_error(request.client, request.id, error, may_still_write=request.may_still_write)

    def _on_request_end(self, request: Request) -> None:
        request.tenant.quota.end_request(request.nbytes, has_started=request.has_started)
        connection = self._connections.get(request.client)
        if connection is not None:
            connection.pending_requests -= 1
        self.memory_budget.release(request.client, request.buffered_bytes)

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Keep so much more of a request.

        Raises:
            ResourceExhausted: there is no room for it.
        """
        self._reserve_memory(request.client, nbytes)
        request.partial_result_bytes += nbytes

    def notify_released(self, request: Request) -> None:
        """Tell a client that nobody writes any more where the outputs of its request were to be."""
        self._send(request.client, Released(request.id))

    def reply_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata."""
        self._send(client, metadata)

    def reply_status(self, client: bytes, status: StatusResponse) -> None:
        """Send the answer to a status request."""
        self._send(client, status, max_bytes=limits.MAX_STATUS_BYTES)

    def reply_metrics(self, client: bytes, metrics: MetricsResponse) -> None:
        """Send the answer to a question for metrics."""
        self._send(client, metrics, max_bytes=limits.MAX_STATUS_BYTES)

    def reply_events(self, client: bytes, events: EventsResponse) -> None:
        """Send the answer to a question for events."""
        self._send(client, events)

    def reply_reloaded(self, client: bytes, response: ReloadResponse) -> None:
        """Send the answer to a reload."""
        self._on_operation_end(client, response.id)
        self._send(client, response)

    def reply_logs(self, client: bytes, logs: LogsResponse) -> None:
        """Send the answer to a question for logs."""
        self._send(client, logs, max_bytes=limits.MAX_STATUS_BYTES)

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Tell the client that an update has taken over, as soon as that is recorded."""
        self._on_operation_end(client, response.id)
        self._unsaved_responses.append((client, response))

    def send_saved_responses(self) -> None:
        """Tell what was not to be told before it was recorded."""
        while self._unsaved_responses:
            self._send(*self._unsaved_responses.pop(0))

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Tell the client that an update or a reload has failed, which was begun for it."""
        self._on_operation_end(client, request_id, error)
        self.reply_error(client, request_id, error)

    def reply_error(
        self, client: bytes, request_id: str, error: RequestError, *, may_still_write: bool = False
    ) -> None:
        """Send an error."""
        retry_after_us = None if error.retry_after is None else int(min(1e6 * error.retry_after, limits.MAX_TIMEOUT_US))
        self._send(client, Error(request_id, error.code, clip(str(error)), retry_after_us, may_still_write or None))

    # --- from clients -------------------------------------------------------------------------------------------

    def _on_message(self, connection: ClientConnection, received: Message) -> None:
        frames, lengths = received
        now = clock.now()
        tenant = connection.tenant
        if tenant is None:
            kind = heading(frames).type
            entry = audit.AuditEntry(kind if kind in FROM_CLIENT else "unknown", connection.identity.audit_name)
            self._audit_refusals.write(entry, audit.REFUSED, str(connection.rejection), now)
            self._reject_message(connection, frames, connection.rejection)
            return
        try:
            tenant.quota.count_message(tenant.config, now)
        except QuotaExceeded as error:
            self._accounts.usage_of(tenant.name, OTHER_MODELS).count_refused(error)
            self._reject_message(connection, frames, error)
            return
        try:
            if len(frames) < len(lengths):
                self.reply_error(
                    connection.key, heading(frames).id, _too_long_error(received, self.memory_budget.max_bytes)
                )
                return
            message = self._decoder.decode(frames, tenant)
        except RemoteProtocolError as error:
            self.reply_error(connection.key, error.request_id, InvalidArgument(str(error)))
            return
        except RequestError as error:
            self._accounts.usage_of(tenant.name, OTHER_MODELS).count_refused(error)
            self.reply_error(connection.key, heading(frames).id, error)
            return
        try:
            self._handlers[message.__class__](connection, message, frames, now)
        except RequestError as error:
            self._count_rejection(connection, tenant, message, error)
            if isinstance(error, (PermissionDenied, Unauthenticated)) or isinstance(message, (Update, Reload)):
                self._audit_refusals.write(_audit_entry(connection, message), audit.REFUSED, str(error), now)
            self.reply_error(connection.key, message.id, error)

    def _reject_message(self, connection: ClientConnection, frames: Sequence[Any], error: RequestError) -> None:
        """Refuse a message that is not heard, whatever it asks. It is not decoded."""
        head = heading(frames)
        if head.type not in MESSAGES_WITHOUT_REPLY:
            self.reply_error(connection.key, head.id, error)

    def _max_description_items(self, tenant: Tenant, leading_fields: Mapping[str, Any]) -> int | None:
        """Return how many items a long description may have by the signature of its model, None while that is unknown.

        Raises:
            RequestError: the description does not begin with the name of a model that exists for the tenant.
        """
        name = leading_fields.get("model_name")
        if type(name) is not str:
            text = f"expected model_name first in more than {preview.SHORT_BYTES} bytes, before lists and maps"
            raise InvalidArgument(f"infer: description: {text}")
        if tenant.config.acts_for and not (name in self._model_registry.models and tenant.can_see(name)):
            # It may exist for the tenant that the message names.
            return None
        signature = self._find_model(name, tenant).dispatcher.signature.built
        return None if signature is None else max_request_items(len(signature.inputs), len(signature.outputs))

    # --- what a client may ask: each raises a RequestError where it is refused --------------------------------------

    def _on_infer(self, connection: ClientConnection, message: Infer, frames: Sequence[Any], now: float) -> None:
        client, description, parameters = connection.key, message.description, message.parameters
        tenant = self._authorizer.resolve_tenant(connection, parameters.tenant)
        if tenant is not connection.tenant:
            tenant.quota.count_message(tenant.config, now)
        check_infer(tenant)
        model = self._find_model(description.model_name, tenant)
        if self._daemon.is_stopping:
            raise Unavailable("weightd is stopping")
        timeout = parameters.timeout_us
        seconds = model.config.timeout if timeout is None else timeout / 1e6
        regions, locations = parameters.regions, NO_LOCATIONS
        if regions is not None:
            if not connection.identity.is_direct and (regions.inputs or regions.outputs):
                raise InvalidArgument(f"parameters.regions: {_UNIX_SOCKET_ONLY}")
            locations = self.regions.locate(client, regions, description.inputs)
        tensors = frames[_TENSOR_FRAMES]
        nbytes = sum(map(len, tensors))
        level = _priority_level(parameters.priority, model.config, tenant.config)
        tenant.quota.check_request(tenant.config, description, nbytes)
        request = Request(
            next(self._request_numbers),
            client,
            message.id,
            description,
            tensors,
            now,
            now + seconds,
            nbytes,
            self._authorizer.request_origin(connection, tenant),
            locations,
            tenant,
            usage=self._accounts.usage_of(tenant.name, description.model_name),
            priority_level=level,
        )
        kept_bytes = request.buffered_bytes
        self._reserve_memory(client, kept_bytes)
        tenant.quota.add_request(nbytes)
        connection.pending_requests += 1
        try:
            model.infer(request, now)
        except RequestError:
            self._on_request_end(request)
            raise
        request.usage.count_accepted(nbytes)

    def _on_cancel(self, connection: ClientConnection, message: Cancel, frames: Sequence[Any], now: float) -> None:
        for each in self._model_registry.all_models():
            each.cancel(connection.key, message.id, now)

    def _on_register(self, connection: ClientConnection, message: Register, frames: Sequence[Any], now: float) -> None:
        if not connection.identity.is_direct:
            raise InvalidArgument(_UNIX_SOCKET_ONLY)
        try:
            most = self._authorizer.resolve_tenant(connection, None).config.max_shared_bytes
            region = self.regions.register(connection.key, connection.stream.descriptors, most)
        except RequestError:
            self._connections.reject_descriptors(connection)
            raise
        self._send(connection.key, Registered(message.id, region))

    def _on_unregister(
        self, connection: ClientConnection, message: Unregister, frames: Sequence[Any], now: float
    ) -> None:
        self.regions.unregister(connection.key, message.region)

    def _on_model_metadata(
        self, connection: ClientConnection, message: ModelMetadata, frames: Sequence[Any], now: float
    ) -> None:
        model = self._find_model(message.model_name, self._charge_viewer(connection, message.tenant, now).tenant)
        model.request_metadata(MetadataRequest(connection.key, message.id, connection.user))

    def _on_server_metadata(
        self, connection: ClientConnection, message: ServerMetadata, frames: Sequence[Any], now: float
    ) -> None:
        models = tuple(self._visible_models(self._charge_viewer(connection, message.tenant, now).tenant))
        self._send(connection.key, ServerMetadataResponse(message.id, "weightd", VERSION, models, EXTENSIONS))

    def _on_ready(
        self, connection: ClientConnection, message: ServerReady | ModelReady, frames: Sequence[Any], now: float
    ) -> None:
        viewer = self._charge_viewer(connection, message.tenant, now).tenant
        if isinstance(message, ModelReady):
            models = [self._find_model(message.model_name, viewer)]
        else:
            models = list(self._visible_models(viewer).values())
        reasons = (
            ["weightd is stopping"]
            if self._daemon.is_stopping
            else [why for each in models if (why := each.unready_reason(now))]
        )
        self._send(connection.key, ReadyResponse(message.id, not reasons, clip("; ".join(reasons))))

    def _on_status(self, connection: ClientConnection, message: Status, frames: Sequence[Any], now: float) -> None:
        self._daemon.report_status(
            _metadata_request(connection, message), self._charge_viewer(connection, message.tenant, now)
        )

    def _on_metrics(self, connection: ClientConnection, message: Metrics, frames: Sequence[Any], now: float) -> None:
        self._daemon.report_metrics(
            _metadata_request(connection, message), self._charge_viewer(connection, message.tenant, now)
        )

    def _on_events(self, connection: ClientConnection, message: Events, frames: Sequence[Any], now: float) -> None:
        self._authorizer.check_status(connection, "events")
        self._daemon.report_events(MetadataRequest(connection.key, message.id, connection.user), message)

    def _on_logs(self, connection: ClientConnection, message: Logs, frames: Sequence[Any], now: float) -> None:
        self._authorizer.check_operator(connection, "read logs")
        self._find_model(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        self._daemon.report_logs(connection.key, message)

    def _on_reload(self, connection: ClientConnection, message: Reload, frames: Sequence[Any], now: float) -> None:
        self._authorizer.check_reload(connection)
        with self._audit_operation(connection, message):
            self._daemon.reload(connection.key, message.id)

    def _on_update(self, connection: ClientConnection, message: Update, frames: Sequence[Any], now: float) -> None:
        self._authorizer.check_operator(connection, "update a model")
        if message.rollback == bool(message.path or message.weights):
            raise InvalidArgument("expected a path, weights, or rollback alone")
        for path in (message.path, message.weights):
            if path and (not Path(path).is_absolute() or "\0" in path):
                raise InvalidArgument(f"expected an absolute path on the daemon's host, got {path!r}")
        model = self._find_model(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        if self._daemon.is_stopping:
            raise Unavailable("weightd is stopping")
        grant = self._authorizer.file_grant(connection)
        paths = {"path": message.path, "weights": message.weights}
        with self._audit_operation(connection, message):
            model.update(connection.key, message.id, now, **paths, rollback=message.rollback, grant=grant)

    @contextlib.contextmanager
    def _audit_operation(self, connection: ClientConnection, message: Update | Reload) -> Generator[None, None, None]:
        """Note for the audit log what is begun in the block, unless it is refused there.

        Raises:
            InvalidArgument: the client has begun something under this id already, which has not ended.
        """
        key = connection.key, message.id
        if key in self._pending_operations:
            raise InvalidArgument(f"id: expected one that no update or reload under way has, got {message.id!r}")
        self._pending_operations[key] = _audit_entry(connection, message)
        try:
            yield
        except RequestError:
            self._pending_operations.pop(key, None)
            raise

    def _on_operation_end(self, client: bytes, request_id: str, error: RequestError | None = None) -> None:
        entry = self._pending_operations.pop((client, request_id), None)
        if entry is None:
            return
        if error is None:
            audit.write(entry, audit.OK)
        else:
            self._audit_refusals.write(entry, audit.FAILED, str(error), clock.now())

    def _charge_viewer(self, connection: ClientConnection, name: str | None, now: float) -> Viewer:
        """Return for whom a client asks what there is, on whose account the question goes.

        Raises:
            RequestError: it may not, or not now.
        """
        viewer = self._authorizer.resolve_viewer(connection, name)
        if name is not None and viewer.tenant is not connection.tenant:
            viewer.tenant.quota.count_message(viewer.tenant.config, now)
        return viewer

    def _find_model(self, name: str, viewer: Tenant) -> ServedModel:
        """Return a model that there is for this tenant.

        Raises:
            NotFound: there is none, and the text is that of one that there is for nobody.
        """
        model = self._model_registry.models.get(name)
        if model is None or not viewer.can_see(name):
            raise NotFound(f"no model {name!r}; there are: {', '.join(self._visible_models(viewer)) or 'none'}")
        return model

    def _visible_models(self, viewer: Tenant) -> Mapping[str, ServedModel]:
        return {name: model for name, model in self._model_registry.models.items() if viewer.can_see(name)}

    # --- within -------------------------------------------------------------------------------------------------

    def _on_disconnecting(self, connection: ClientConnection, error: RequestError) -> None:
        if connection.tenant is not None and isinstance(error, QuotaExceeded):
            self._accounts.usage_of(connection.tenant.name, OTHER_MODELS).count_refused(error)
        self.reply_error(connection.key, "", error)

    def _count_rejection(self, connection: ClientConnection, tenant: Tenant, message: Any, error: RequestError) -> None:
        name = OTHER_MODELS
        if isinstance(message, Infer):
            name = message.description.model_name
            # Where it names one that it does not act for, it is its own.
            with contextlib.suppress(RequestError):
                tenant = self._authorizer.resolve_tenant(connection, message.parameters.tenant)
        # A tenant is told its own accounts: none is called as a model that there is not for it.
        is_there = name in self._model_registry.models and tenant.can_see(name)
        account = self._accounts.usage_of(tenant.name, name if is_there else OTHER_MODELS)
        account.count_refused(error, requests=isinstance(message, Infer))

    def _on_disconnected(self, connection: ClientConnection) -> None:
        self._authorizer.remove_connection(connection)
        if connection.has_sent_message:
            for model in self._model_registry.all_models():
                model.on_disconnect(connection.key, clock.now())
        self.regions.remove_client(connection.key)

    def _unmap_closed(self) -> None:
        self._daemon.unmap(self.regions.free_closed())

    # --- memory -------------------------------------------------------------------------------------------------

    def _user_of(self, client: bytes) -> str:
        connection = self._connections.get(client)
        return "" if connection is None else connection.user

    def _reserve_memory(self, client: bytes, nbytes: int) -> None:
        if not self.memory_budget.can_reserve(nbytes) and not self._free_memory(client, nbytes):
            raise ResourceExhausted(_MEMORY_FULL, retry_after=_RETRY_AFTER_S)
        self.memory_budget.reserve(client, nbytes)

    def _free_memory(self, client: bytes, nbytes: int) -> bool:
        """Return whether there is room for so much more of a client, after those that have more have given theirs."""
        while not self.memory_budget.can_reserve(nbytes):
            largest = self.memory_budget.largest_client(client, nbytes)
            if largest == client:
                return False
            held = self.memory_budget.used_by(largest)
            connection = self._connections.get(largest)
            unread = 0 if connection is None else connection.unread_bytes
            if 2 * unread < held:
                self._shed_requests(largest)
            if self.memory_budget.used_by(largest) == held:
                if connection is not None:
                    why = f"{held // 2**20} MiB are kept for it, {unread // 2**20} of them not read"
                    self._connections.disconnect(connection, why)
                self.memory_budget.release_all(largest)
        return True

    def _shed_requests(self, client: bytes) -> None:
        memory_error = ResourceExhausted(_MEMORY_FULL, retry_after=_RETRY_AFTER_S)
        for model in self._model_registry.all_models():
            model.shed(lambda request: request.client == client, memory_error, clock.now())

    def _send(
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
            header, frames = encode(Error(message.id, Internal.code, clip(f"the response cannot be sent: {error}"))), ()
        if not self._connections.send(client, [*header, *frames]):
            dropped_error = ResourceExhausted("the response is dropped: the client has not read earlier ones")
            self._connections.send(client, encode(Error(message.id, dropped_error.code, str(dropped_error))))


def _metadata_request(connection: ClientConnection, message: Status | Metrics) -> MetadataRequest:
    """Return who asks, on the account of the tenant that the message names, if it names one."""
    user = connection.user if message.tenant is None else f"tenant {message.tenant}"
    return MetadataRequest(connection.key, message.id, user)


def _audit_entry(connection: ClientConnection, message: Any) -> audit.AuditEntry:
    """Return what the audit log says of a message."""
    tenant = "" if connection.tenant is None else connection.tenant.name
    if isinstance(message, Update):
        action = "rollback" if message.rollback else "update"
        return audit.AuditEntry(
            action, connection.identity.audit_name, tenant, message.model_name, message.path, message.weights
        )
    name = message.description.model_name if isinstance(message, Infer) else getattr(message, "model_name", "")
    return audit.AuditEntry(_MESSAGE_TYPES[message.__class__], connection.identity.audit_name, tenant, name)


def _too_long_error(received: Message, max_bytes: int) -> RequestError:
    """What is to be said of a message of which not everything was kept."""
    for name, length in zip(("envelope", "description"), received.lengths, strict=False):
        if length > limits.MAX_HEADER_BYTES:
            return InvalidArgument(f"{name}: expected at most {limits.MAX_HEADER_BYTES} bytes, got {length}")
    nbytes = sum(received.lengths)
    if nbytes > max_bytes:
        return InvalidArgument(f"frames: expected at most {max_bytes} bytes in all (max_memory_bytes), got {nbytes}")
    return ResourceExhausted(_MEMORY_FULL, retry_after=_RETRY_AFTER_S)


def _priority_level(priority: int | None, model: ModelConfig, tenant: TenantConfig) -> int:
    """How many levels of priority come before that of a request."""
    if not priority:
        return max(model.default_level, tenant.priority_max) - 1
    if priority > model.priority_levels:
        expected = f"expected at most priority_levels of the model, {model.priority_levels}, got {priority}"
        raise InvalidArgument(f"parameters.priority: {expected}")
    if priority < tenant.priority_max:
        text = f"parameters.priority: priority_max of this tenant is {tenant.priority_max}, got {priority}"
        raise QuotaExceeded("priority_max", text)
    return priority - 1
