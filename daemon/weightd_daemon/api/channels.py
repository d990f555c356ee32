"""Opens direct channels for clients, and dispatches the requests of channels that no worker has run."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.responses import ClientResponses
from weightd_daemon.channels.packets import message_of
from weightd_daemon.channels.service import ChannelService
from weightd_daemon.channels.sockets import ChannelOwner
from weightd_daemon.channels.states import ChannelEvent
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.scheduling.request import Request
from weightd_daemon.tenants.usage import UsageTable
from weightd_daemon.transport.connection import ClientConnection
from weightd_daemon.transport.connections import ClientConnections
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode, heading
from weightd_protocol.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    RemoteProtocolError,
    RequestError,
    Unavailable,
)
from weightd_protocol.framing import Message
from weightd_protocol.messages.channels import FROM_CHANNEL, ChannelOpened, OpenChannel
from weightd_protocol.messages.types import DaemonMessage

# Quotas that the daemon can only apply to requests that it receives.
_QUOTAS = ("max_rate", "max_in_flight", "max_queue", "max_queue_bytes", "max_rows")


class ChannelApi:
    """Handles `open_channel`, and is the connection between `ChannelService` and the clients.

    Args:
        service: the direct channels.
        lookup: finds the models that clients name.
        authorizer: determines the tenant of a client.
        usage_table: the usage counters.
        connections: the connections of all clients.
        responses: sends replies.
        on_message: handles a message as if the client had sent it on its connection.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        service: ChannelService,
        lookup: ModelLookup,
        authorizer: Authorizer,
        usage_table: UsageTable,
        connections: ClientConnections,
        responses: ClientResponses,
        on_message: Callable[[ClientConnection, Message], object],
    ) -> None:
        self._service = service
        self._registry = lookup.registry
        self._authorizer = authorizer
        self._usage_table = usage_table
        self._connections = connections
        self._responses = responses
        self._on_message = on_message
        responses.direct_clients = service.by_client
        responses.on_direct_client = self._on_answered

    def on_open_channel(
        self, connection: ClientConnection, message: OpenChannel, frames: Sequence[Any], now: float
    ) -> None:
        """Open a direct channel to a model.

        Raises:
            RequestError: the client may not use the model, or its requests have to pass through the daemon.
        """
        if not connection.identity.is_direct:
            raise InvalidArgument("open_channel: direct channels exist only on the unix socket")
        tenant, origin = self._authorizer.authorize_infer(connection, message.tenant, now)
        model = self._registry.models.get(message.model_name)
        if model is None or not tenant.can_see(message.model_name):
            raise FailedPrecondition("open_channel: model_name: expected the name of a model without versions")
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        _check_quotas(tenant.config)
        model.dispatcher.isolator.check_direct(origin, tenant, now)
        usage = self._usage_table.usage_of(tenant.name, model.name)
        self._service.open(
            ChannelOwner(connection.key, message.id, model.name, origin, tenant, usage, message.tenant), now
        )

    # --- called by the service ----------------------------------------------------------------------------------

    def send_channel(self, client: bytes, message: ChannelOpened, descriptor: int) -> bool:
        """Send a client its end of a channel; return False if it could not be sent."""
        return self._connections.send_descriptor(client, encode(message), descriptor)

    def reply(self, client: bytes, message: DaemonMessage) -> None:
        """Send a message to a client."""
        self._responses.reply(client, message)

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to a client."""
        self._responses.reply_error(client, request_id, error)

    def on_packet(self, owner: ChannelOwner, packet: bytes) -> None:
        """Handle a request that was sent on a channel, as if the client had sent it on its connection."""
        connection, found = self._connections.get(owner.client), message_of(packet)
        if connection is None or found is None or connection.is_closing:
            return
        deadline_us, message = found
        try:
            message = adopt(message, owner, deadline_us - int(time.monotonic() * 1e6))
        except RemoteProtocolError as error:
            self._responses.reply_error(owner.client, heading(message.frames).id, InvalidArgument(str(error)))
        except RequestError as error:
            self._responses.reply_error(owner.client, heading(message.frames).id, error)
        else:
            self._on_message(connection, message)

    # --- called by the router -----------------------------------------------------------------------------------

    def on_disconnect(self, client: bytes) -> None:
        """End the channels of a client that has disconnected."""
        self._service.on_disconnect(client)

    def on_tenants_changed(self, now: float) -> None:
        """End all channels, because the rights of their clients may have changed."""
        self._service.update_weights(now)
        self._service.end_all(ChannelEvent.RIGHTS_CHANGE)

    def close(self) -> None:
        """Close the daemon's descriptors of the channels."""
        self._service.close()

    def stop(self) -> None:
        """End all channels; workers answer the requests that are queued in them."""
        self._service.end_all(ChannelEvent.REVOKE)

    def _on_answered(self, request: Request) -> None:
        """Let workers run further requests of a client with the description of a request that was answered."""
        frame: bytes | None = getattr(request.description, "_frame", None)
        if frame is not None and not request.locations.inputs and request.priority_level == 0:
            self._service.on_answered(request.client, request.usage, hashlib.sha256(frame).hexdigest())


def adopt(message: Message, owner: ChannelOwner, left_us: int) -> Message:
    """Return a request of a channel as a message on the connection: with its tenant, and the time that it has left.

    A worker that a request has corrupted may hand over anything, and the client may be trusted with more than requests.
    So only requests to the model of the channel pass.

    Args:
        message: the message.
        owner: for whom the channel was opened.
        left_us: the microseconds until the deadline.

    Raises:
        RemoteProtocolError: the message is no request.
        InvalidArgument: the request is for another model.
        DeadlineExceeded: the deadline has passed.
    """
    infer = decode(message.frames, FROM_CHANNEL)
    model = infer.description.model_name
    if model != owner.model:
        raise InvalidArgument(f"model_name: expected {owner.model}, the model of the direct channel, got {model}")
    if left_us <= 0:
        raise DeadlineExceeded("was waiting on its direct channel at its deadline")
    tenant = infer.parameters.tenant if owner.named_tenant is None else owner.named_tenant
    timeout_us = min(left_us, limits.MAX_TIMEOUT_US)
    parameters = dataclasses.replace(infer.parameters, tenant=tenant, timeout_us=timeout_us)
    infer = dataclasses.replace(infer, parameters=parameters)
    frames = [*encode(infer), *message.frames[limits.MAX_HEADER_FRAMES :]]
    return Message(frames, tuple(map(len, frames)))


def _check_quotas(config: TenantConfig) -> None:
    for name in _QUOTAS:
        if getattr(config, name):
            raise FailedPrecondition(f"open_channel: this tenant has {name}, so the daemon receives all its requests")
