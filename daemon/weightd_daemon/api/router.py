"""The request router: decodes each message of a client, and calls the handler for the message's type.

An inference request passes through these steps:

    receive    `RequestRouter` decodes the message and calls the handler of its type
    authorize  `InferenceApi.on_infer` finds the tenant of the request and checks that the tenant may use the model
    validate   timeout, shared memory, priority and quotas are checked, and memory is reserved in the budget for clients
    load       `ModelLifecycle` loads a model on demand; the request waits in the queue
    enqueue    `Dispatcher.infer` checks the inputs and starts the request on a free slot, or puts it into the queue
    dispatch   `Dispatcher.dispatch` forms the next batch when a slot is free
    execute    the slot's processes run the batch and report to `BatchResults.on_result`
    reply      `ClientResponses.reply_result` sends the answer and updates the usage counters
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightd_daemon.api.admin import AdminApi, DaemonControl
from weightd_daemon.api.authorization import RIGHT_REVOKED, Authorizer
from weightd_daemon.api.channels import ChannelApi
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.region_registry import RegionRegistry
from weightd_daemon.api.responses import ClientResponses, too_long_error
from weightd_daemon.api.status import StatusApi
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import INFER, TenantConfig
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import ConnectionAdmission, UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.scheduling.request import OVERHEAD_BYTES, Request
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, TensorLocations
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, UsageTable
from weightd_daemon.transport.connection import ClientConnection, ClientIdentity
from weightd_daemon.transport.connections import ClientConnections, ConnectionCallbacks
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol import limits, preview
from weightd_protocol.codec import Decoder, heading, max_request_items
from weightd_protocol.errors import InvalidArgument, PermissionDenied, RemoteProtocolError, RequestError, Unavailable
from weightd_protocol.framing import Message
from weightd_protocol.messages.channels import OpenChannel
from weightd_protocol.messages.control import (
    Load,
    ModelMetadata,
    ModelReady,
    Reload,
    Rollout,
    ServerMetadata,
    ServerReady,
    Unload,
    Update,
)
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.inference import Cancel, Infer
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.regions import Register, Registered, Unregister
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import FROM_CLIENT, MESSAGES_WITHOUT_REPLY

# The index range of the tensor frames in the frames of a message.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

_UNIX_SOCKET_ONLY = "memory can be shared only on the unix socket"

# Type of a function that handles a decoded message. Its arguments are the connection, the message, all frames of the
# message, and the time in monotonic seconds.
MessageHandler = Callable[[ClientConnection, Any, Sequence[Any], float], None]


class RequestRouter:
    """Decodes messages of clients, and calls the handlers in `InferenceApi`, `StatusApi` and `AdminApi`.

    Args:
        loop: the event loop.
        lookup: finds the models that clients name.
        memory_budget: the budget for memory that is held for clients.
        daemon: the operations on the whole daemon.
        max_shm_bytes: the maximum number of bytes of all shared memory regions of one user.
        user_limits: the limits on each user's connections to the Unix socket.
        authorizer: determines the tenants of clients and checks their rights.
        log: the rate-limited log for events that clients cause.

    Attributes:
        regions: the shared memory regions of clients.
        responses: sends replies.
        admin: handles the messages of operators.
        channels: opens direct channels.
    """

    def __init__(  # noqa: PLR0913
        self,
        loop: EventLoop,
        lookup: ModelLookup,
        memory_budget: MemoryBudget,
        daemon: DaemonControl,
        *,
        max_shm_bytes: int,
        user_limits: UserConnectionLimits,
        authorizer: Authorizer,
        log: ClientLog | None = None,
    ) -> None:
        self._loop = loop
        self._lookup = lookup
        self._model_registry = lookup.registry
        self._unmap = daemon.unmap
        self._authorizer = authorizer
        self._usage_table: UsageTable = authorizer.accounts
        self._memory_budget = memory_budget
        self.regions = RegionRegistry(
            max_shm_bytes, self.user_of, functools.partial(loop.call_soon, self._unmap_closed)
        )
        callbacks = ConnectionCallbacks(
            self._free_memory,
            authorizer.limit_account_of,
            authorizer.assign_tenant,
            self._on_message,
            self._on_disconnecting,
            self._on_disconnected,
        )
        self._connections = ClientConnections(loop, memory_budget, ConnectionAdmission(user_limits), callbacks, log)
        self.responses = ClientResponses(self._connections, memory_budget, self._shed_requests)
        self._inference = InferenceApi(
            lookup, authorizer, self._usage_table, self.regions, self.responses, memory_budget
        )
        self.channels = ChannelApi(
            daemon.channels,
            lookup,
            authorizer,
            self._usage_table,
            self._connections,
            self.responses,
            self._on_message,
        )
        self.admin = AdminApi(lookup, authorizer, daemon, self.responses)
        status = StatusApi(lookup, authorizer, daemon.status, self.responses)
        self._decoder = Decoder(FROM_CLIENT, max_items_for=self._inference.max_description_items)
        self._handlers: dict[type[Any], MessageHandler] = {
            Infer: self._inference.on_infer,
            Cancel: self._inference.on_cancel,
            OpenChannel: self.channels.on_open_channel,
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
            Load: self.admin.on_load,
            Unload: self.admin.on_unload,
            Update: self.admin.on_update,
            Rollout: self.admin.on_rollout,
            Reload: self.admin.on_reload,
        }

    # --- connections --------------------------------------------------------------------------------------------

    @property
    def dropped_responses(self) -> int:
        """The number of replies that could not be sent because the client had disconnected or did not read."""
        return self._connections.dropped_messages

    def listen(self, listener: socket.socket) -> None:
        """Accept clients on a listening, non-blocking Unix socket."""
        self._connections.listen(listener)

    def adopt(self, connection: socket.socket, identity: ClientIdentity) -> None:
        """Serve a client that is connected to a ZeroMQ proxy, over the proxy's stream; take ownership of the socket."""
        self._connections.adopt(connection, identity)

    def on_tenants_changed(self) -> None:
        """Assign all clients to their new tenants, and end queued requests that a client may not send any more."""
        previous_tenants = {each.key: each.tenant for each in self._connections}
        self._connections.reassign_tenants()
        self.channels.on_tenants_changed(event_loop.now())
        is_revoked = self._authorizer.revocation_filter(self._connections.get, previous_tenants)
        for model in self._model_registry.all_models():
            model.dispatcher.shed(is_revoked, PermissionDenied(RIGHT_REVOKED), event_loop.now())
            model.dispatcher.metadata.reject(
                functools.partial(self._is_model_hidden, model.name), PermissionDenied(RIGHT_REVOKED)
            )

    def close(self) -> None:
        """Disconnect all clients."""
        self.channels.close()
        self._connections.close()

    def cork(self) -> None:
        """Delay small messages to clients until the end of this turn of the loop, so that several are sent together."""
        self._connections.cork()

    # --- messages -----------------------------------------------------------------------------------------------

    def _on_message(self, connection: ClientConnection, received: Message) -> None:
        frames, lengths = received
        now = self._loop.now
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
                too_long = too_long_error(received, self._memory_budget.max_bytes)
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
        """Reply to a message with an error, without decoding the message."""
        head = heading(frames)
        if head.type not in MESSAGES_WITHOUT_REPLY:
            self.responses.reply_error(connection.key, head.id, error)

    def _count_refused(self, connection: ClientConnection, tenant: Tenant, message: Any, error: RequestError) -> None:
        name = OTHER_MODELS
        if isinstance(message, Infer):
            name = self._lookup.resolve(message.description.model_name, message.id)
            # If the client may not act for the tenant in the message, the refusal counts for the client's own tenant.
            with contextlib.suppress(RequestError):
                tenant = self._authorizer.resolve_tenant(connection, message.parameters.tenant)
        # A tenant can see its usage, so the usage must not reveal whether a hidden model exists.
        if not self._lookup.is_visible(name, tenant):
            name = OTHER_MODELS
        self._usage_table.usage_of(tenant.name, name).count_refused(error, requests=isinstance(message, Infer))

    # --- disconnects --------------------------------------------------------------------------------------------

    def _on_disconnecting(self, connection: ClientConnection, error: RequestError) -> None:
        if connection.tenant is not None and isinstance(error, QuotaExceeded):
            self._usage_table.usage_of(connection.tenant.name, OTHER_MODELS).count_refused(error)
        self.responses.reply_error(connection.key, "", error)

    def _on_disconnected(self, connection: ClientConnection) -> None:
        self._authorizer.remove_connection(connection)
        self.channels.on_disconnect(connection.key)
        if connection.has_sent_message:
            self._inference.on_disconnect(connection.key, event_loop.now())
        self.regions.remove_client(connection.key)

    def _unmap_closed(self) -> None:
        self._unmap(self.regions.free_closed())

    def _is_model_hidden(self, model: str, client: bytes) -> bool:
        connection = self._connections.get(client)
        return (
            connection is None
            or connection.tenant is None
            or not self._authorizer.resolve_viewer(connection).tenant.can_see(model)
        )

    def user_of(self, client: bytes) -> str:
        """Return the user or tenant to which a client's memory counts; "" for an unknown client."""
        connection = self._connections.get(client)
        return "" if connection is None else connection.user

    def _free_memory(self, client: bytes, nbytes: int) -> bool:
        return self.responses.free_memory(client, nbytes)

    def _shed_requests(self, client: bytes, error: RequestError) -> None:
        for model in self._model_registry.all_models():
            model.dispatcher.shed(lambda request: request.client == client, error, event_loop.now())


class InferenceApi:
    """Handlers of inference requests, cancellations and registrations of shared memory regions.

    Each handler raises a `RequestError` if it refuses the message.

    Args:
        lookup: finds the models that clients name.
        authorizer: determines the tenant of a request.
        usage_table: the usage counters.
        regions: the shared memory regions of clients.
        responses: sends replies, and updates the usage counters when a request ends.
        memory_budget: the budget for memory that is held for clients.
    """

    def __init__(
        self,
        lookup: ModelLookup,
        authorizer: Authorizer,
        usage_table: UsageTable,
        regions: RegionRegistry,
        responses: ClientResponses,
        memory_budget: MemoryBudget,
    ) -> None:
        self._registry = lookup.registry
        self._lookup = lookup
        self._authorizer = authorizer
        self._usage_table = usage_table
        self._regions = regions
        self._responses = responses
        self._memory_budget = memory_budget
        # Request numbers start at the time in microseconds, so that no request gets a number that a previous daemon has
        # given to another request: a worker may still answer a request of the previous daemon.
        self._request_numbers = itertools.count(time.time_ns() // 1000)

    def on_infer(self, connection: ClientConnection, message: Infer, frames: Sequence[Any], now: float) -> None:
        """Authorize and validate a request, and pass it to the dispatcher of its model."""
        client, description, parameters = connection.key, message.description, message.parameters
        own_tenant = connection.tenant
        if own_tenant is not None and parameters.tenant is None and INFER in own_tenant.config.may:
            tenant, origin = own_tenant, connection.origin
        else:
            tenant, origin = self._authorizer.authorize_infer(connection, parameters.tenant, now)
        model = self._registry.models.get(description.model_name)
        if model is None or not tenant.known_models.get(description.model_name):
            model, description = self._lookup.find_for_request(description, message.id, tenant)
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        config, timeout = model.config, parameters.timeout_us
        priority_level = 0
        if parameters.priority or config.priority_levels > 1 or tenant.config.priority_max:
            priority_level = _priority_level(parameters.priority, config, tenant.config)
        locations = NO_LOCATIONS if parameters.regions is None else self._locate(connection, message)
        tensors = frames[_TENSOR_FRAMES]
        nbytes = sum(map(len, tensors))
        usage = self._usage_table.usage_of(tenant.name, model.name)
        request = Request(
            next(self._request_numbers),
            client,
            message.id,
            description,
            tensors,
            now,
            now + (config.timeout if timeout is None else timeout / 1e6),
            nbytes,
            origin,
            locations,
            tenant,
            usage,
            priority_level,
            nbytes + OVERHEAD_BYTES,
        )
        tenant.quota.add_request(tenant.config, description, nbytes)
        usage.count_accepted(nbytes)
        reserved_bytes = 0
        try:
            if not self._memory_budget.try_reserve(client, request.buffered_bytes):
                self._responses.reserve_freed(request)
            reserved_bytes = request.buffered_bytes
            loading = model.loading
            if loading.is_unloaded:
                loading.load_on_demand(tenant.name)
            loading.last_used_at = now
            model.dispatcher.infer(request, now)
        except RequestError:
            tenant.quota.end_request(nbytes, has_started=False)
            usage.uncount_accepted(nbytes)
            self._memory_budget.release(client, reserved_bytes)
            raise
        connection.pending_requests += 1

    def on_cancel(self, connection: ClientConnection, message: Cancel, frames: Sequence[Any], now: float) -> None:
        """Cancel a request of the client. The message does not name the model, so all models look for the request."""
        for each in self._registry.all_models():
            each.dispatcher.cancel(connection.key, message.id, now)

    def on_register(self, connection: ClientConnection, message: Register, frames: Sequence[Any], now: float) -> None:
        """Register the shared memory region whose descriptor came with the message."""
        if not connection.identity.is_direct:
            raise InvalidArgument(_UNIX_SOCKET_ONLY)
        try:
            max_bytes = self._authorizer.resolve_tenant(connection, None).config.max_shared_bytes
            region = self._regions.register(connection.key, connection.stream.descriptors, max_bytes)
        except RequestError:
            self._responses.reject_descriptors(connection)
            raise
        self._responses.reply(connection.key, Registered(message.id, region))

    def on_unregister(
        self, connection: ClientConnection, message: Unregister, frames: Sequence[Any], now: float
    ) -> None:
        """Unregister a shared memory region."""
        self._regions.unregister(connection.key, message.region)

    def on_disconnect(self, client: bytes, now: float) -> None:
        """End all requests of a client that has disconnected."""
        for model in self._registry.all_models():
            model.dispatcher.on_disconnect(client, now)

    def max_description_items(self, tenant: Tenant, leading_fields: Mapping[str, Any]) -> int | None:
        """Return how many items a long description may have by the model's signature; None if this is unknown.

        Raises:
            RequestError: the description does not begin with the name of a model that the tenant can see.
        """
        name = leading_fields.get("model_name")
        if type(name) is not str:
            expected = f"expected model_name before lists and maps if longer than {preview.SHORT_BYTES} bytes"
            raise InvalidArgument(f"infer: description: {expected}")
        if tenant.config.acts_for and not self._lookup.is_visible(name, tenant):
            # The message may name another tenant, which can see the model, so the number is not known yet.
            return None
        signature = self._lookup.find(name, tenant).dispatcher.signature.built
        return None if signature is None else max_request_items(len(signature.inputs), len(signature.outputs))

    def _locate(self, connection: ClientConnection, message: Infer) -> TensorLocations:
        """Return the locations of the tensors of a request that are in shared memory."""
        regions = message.parameters.regions
        if regions is None:
            return NO_LOCATIONS
        if not connection.identity.is_direct and (regions.inputs or regions.outputs):
            raise InvalidArgument(f"parameters.regions: {_UNIX_SOCKET_ONLY}")
        return self._regions.locate(connection.key, regions, message.description.inputs)


def _priority_level(priority: int | None, model: ModelConfig, tenant: TenantConfig) -> int:
    """Return the priority level of a request, from its priority, its model and its tenant; 0 is the highest level."""
    if not priority:
        return max(model.default_level, tenant.priority_max) - 1
    if priority > model.priority_levels:
        expected = f"expected at most priority_levels of the model, {model.priority_levels}, got {priority}"
        raise InvalidArgument(f"parameters.priority: {expected}")
    if priority < tenant.priority_max:
        text = f"parameters.priority: priority_max of this tenant is {tenant.priority_max}, got {priority}"
        raise QuotaExceeded("priority_max", text)
    return priority - 1
