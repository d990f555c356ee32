"""The daemon's side towards its clients: reads each message and calls the handler of its type."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weightd_daemon.api.admin import AdminApi, DaemonAdmin
from weightd_daemon.api.authorization import RIGHT_REVOKED, Authorizer
from weightd_daemon.api.inference import InferenceApi
from weightd_daemon.api.region_registry import RegionRegistry
from weightd_daemon.api.responses import ClientResponses, memory_full
from weightd_daemon.api.status import StatusApi, StatusReporter
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import ConnectionAdmission, UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, UsageTable
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_daemon.transport.connections import ClientConnections, ConnectionCallbacks
from weightd_daemon.transport.memory_budget import HeapTrimmer, MemoryBudget
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, heading
from weightd_protocol.errors import InvalidArgument, PermissionDenied, RemoteProtocolError, RequestError
from weightd_protocol.framing import Message
from weightd_protocol.messages.control import ModelMetadata, ModelReady, Reload, ServerMetadata, ServerReady, Update
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.inference import Cancel, Infer
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.regions import Register, Unregister
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import FROM_CLIENT, MESSAGES_WITHOUT_REPLY

# Who has sent it, the message, all its frames, and when that was.
MessageHandler = Callable[[ClientConnection, Any, Sequence[Any], float], None]


class DaemonControl(DaemonAdmin, StatusReporter, Protocol):
    """What a client may ask of the daemon as a whole."""

    def unmap(self, numbers: Sequence[int]) -> None:
        """Take regions away from the workers that were given them: no client names them any more."""


class RequestRouter:
    """Reads what clients send, and calls the handlers of the three parts of the API.

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
        responses: sends replies.
        admin: the changes that operators make, and their replies.
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
        self._usage_table: UsageTable = authorizer.accounts
        self.memory_budget = MemoryBudget(
            max_memory_bytes, self._user_of, lambda: heap_trimmer.on_large_message(event_loop.now())
        )
        heap_trimmer = HeapTrimmer(self.memory_budget)
        loop.add_timer(heap_trimmer.timer)
        self.regions = RegionRegistry(
            max_shm_bytes, self._user_of, functools.partial(loop.call_soon, self._unmap_closed)
        )
        callbacks = ConnectionCallbacks(
            self._free_memory,
            authorizer.limit_account_of,
            authorizer.assign_tenant,
            self._on_message,
            self._on_disconnecting,
            self._on_disconnected,
        )
        self._connections = ClientConnections(
            loop, self.memory_budget, ConnectionAdmission(user_limits), callbacks, log
        )
        self.responses = ClientResponses(self._connections, self.memory_budget, self._shed_requests)
        self._inference = InferenceApi(
            model_registry, authorizer, self._usage_table, self.regions, self.responses, self.memory_budget
        )
        self.admin = AdminApi(model_registry, authorizer, daemon, self.responses)
        status = StatusApi(model_registry, authorizer, daemon, self.responses)
        self._decoder = Decoder(FROM_CLIENT, max_items_for=self._inference.max_description_items)
        self._handlers: dict[type[Any], MessageHandler] = {
            Infer: self._inference.on_infer,
            Cancel: self._inference.on_cancel,
            Register: self._inference.on_register,
            Unregister: self._inference.on_unregister,
            ModelMetadata: status.on_model_metadata,
            ServerMetadata: status.on_server_metadata,
            ServerReady: status.on_ready,
            ModelReady: status.on_ready,
            Status: status.on_status,
            Metrics: status.on_metrics,
            Events: status.on_events,
            Logs: self.admin.on_logs,
            Update: self.admin.on_update,
            Reload: self.admin.on_reload,
        }

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def dropped_responses(self) -> int:
        """Replies that could not be sent: their client was gone, or did not read."""
        return self._connections.dropped_messages

    def listen(self, listener: socket.socket) -> None:
        """Let clients connect to a unix socket, which listens and does not block."""
        self._connections.listen(listener)

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Serve a client that has come by another way; the socket is this object's from now on."""
        self._connections.adopt(connection, identity)

    def on_tenants_changed(self) -> None:
        """The tables of tenants have changed: end each request that waits and that its client may not send any more."""
        previous_tenants = {each.key: each.tenant for each in self._connections}
        self._connections.reassign_tenants()
        is_revoked = self._authorizer.revocation_filter(self._connections.get, previous_tenants)
        for model in self._model_registry.all_models():
            model.dispatcher.shed(is_revoked, PermissionDenied(RIGHT_REVOKED), event_loop.now())
            model.dispatcher.metadata.reject(
                functools.partial(self._is_model_hidden, model.name), PermissionDenied(RIGHT_REVOKED)
            )

    def close(self) -> None:
        """Let all clients go."""
        self._connections.close()

    def cork(self) -> None:
        """Keep small messages to clients back until the end of this turn: several are to come at once."""
        self._connections.cork()

    # --- messages -----------------------------------------------------------------------------------------------

    def _on_message(self, connection: ClientConnection, received: Message) -> None:
        frames, lengths = received
        now = event_loop.now()
        tenant = connection.tenant
        if tenant is None:
            self.admin.audit_unknown_client(connection, heading(frames).type, now)
            self._reject_message(connection, frames, connection.rejection)
            return
        try:
            if tenant.config.max_rate:
                tenant.quota.count_message(tenant.config, now)
        except QuotaExceeded as error:
            self._usage_table.usage_of(tenant.name, OTHER_MODELS).count_refused(error)
            self._reject_message(connection, frames, error)
            return
        try:
            if len(frames) < len(lengths):
                too_long = _too_long_error(received, self.memory_budget.max_bytes)
                self.responses.reply_error(connection.key, heading(frames).id, too_long)
                return
            message = self._decoder.decode(frames, tenant)
        except RemoteProtocolError as error:
            self.responses.reply_error(connection.key, error.request_id, InvalidArgument(str(error)))
            return
        except RequestError as error:
            self._usage_table.usage_of(tenant.name, OTHER_MODELS).count_refused(error)
            self.responses.reply_error(connection.key, heading(frames).id, error)
            return
        try:
            self._handlers[message.__class__](connection, message, frames, now)
        except RequestError as error:
            self._count_refused(connection, tenant, message, error)
            self.admin.audit_refusal(connection, message, error, now)
            self.responses.reply_error(connection.key, message.id, error)

    def _reject_message(self, connection: ClientConnection, frames: Sequence[Any], error: RequestError) -> None:
        """Refuse a message that is not decoded, whatever it asks."""
        head = heading(frames)
        if head.type not in MESSAGES_WITHOUT_REPLY:
            self.responses.reply_error(connection.key, head.id, error)

    def _count_refused(self, connection: ClientConnection, tenant: Tenant, message: Any, error: RequestError) -> None:
        name = OTHER_MODELS
        if isinstance(message, Infer):
            name = message.description.model_name
            # Where it names a tenant that it does not act for, the refusal is on its own account.
            with contextlib.suppress(RequestError):
                tenant = self._authorizer.resolve_tenant(connection, message.parameters.tenant)
        # A tenant sees its own accounts: none has the name of a model that does not exist for it.
        if not self._model_registry.is_visible(name, tenant):
            name = OTHER_MODELS
        self._usage_table.usage_of(tenant.name, name).count_refused(error, requests=isinstance(message, Infer))

    # --- ends of connections ------------------------------------------------------------------------------------

    def _on_disconnecting(self, connection: ClientConnection, error: RequestError) -> None:
        if connection.tenant is not None and isinstance(error, QuotaExceeded):
            self._usage_table.usage_of(connection.tenant.name, OTHER_MODELS).count_refused(error)
        self.responses.reply_error(connection.key, "", error)

    def _on_disconnected(self, connection: ClientConnection) -> None:
        self._authorizer.remove_connection(connection)
        if connection.has_sent_message:
            self._inference.on_disconnect(connection.key, event_loop.now())
        self.regions.remove_client(connection.key)

    def _unmap_closed(self) -> None:
        self._daemon.unmap(self.regions.free_closed())

    def _is_model_hidden(self, model: str, client: bytes) -> bool:
        connection = self._connections.get(client)
        return (
            connection is None
            or connection.tenant is None
            or not self._authorizer.resolve_viewer(connection).tenant.can_see(model)
        )

    def _user_of(self, client: bytes) -> str:
        connection = self._connections.get(client)
        return "" if connection is None else connection.user

    def _free_memory(self, client: bytes, nbytes: int) -> bool:
        return self.responses.free_memory(client, nbytes)

    def _shed_requests(self, client: bytes, error: RequestError) -> None:
        for model in self._model_registry.all_models():
            model.dispatcher.shed(lambda request: request.client == client, error, event_loop.now())


def _too_long_error(received: Message, max_bytes: int) -> RequestError:
    """Return the error of a message of which not everything was kept."""
    for name, length in zip(("envelope", "description"), received.lengths, strict=False):
        if length > limits.MAX_HEADER_BYTES:
            return InvalidArgument(f"{name}: expected at most {limits.MAX_HEADER_BYTES} bytes, got {length}")
    nbytes = sum(received.lengths)
    if nbytes > max_bytes:
        return InvalidArgument(f"frames: expected at most {max_bytes} bytes in all (max_memory_bytes), got {nbytes}")
    return memory_full()
