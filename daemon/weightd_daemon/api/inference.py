"""Inference requests: what happens to one from its arrival until a dispatcher has it.

receive    `RequestRouter` decodes the message and calls `InferenceApi.on_infer`
authorize  on whose account the request goes, and whether that tenant may ask this model
validate   timeout, shared memory, priority and quotas; the request takes room in the daemon's memory
enqueue    `Dispatcher.infer` checks the inputs and starts the request on a free slot, or puts it into the queue
dispatch   `Dispatcher.dispatch` forms the next batch when a slot is free
execute    the slot's processes run the batch and report to `Dispatcher.on_result`
reply      `ClientResponses.reply_result` settles the accounts and sends the answer
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.region_registry import RegionRegistry
from weightd_daemon.api.responses import ClientResponses
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import INFER, TenantConfig
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.scheduling.request import OVERHEAD_BYTES, Request
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, TensorLocations
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import QuotaExceeded, UsageTable
from weightd_daemon.transport.connection import ClientConnection
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol import limits, preview
from weightd_protocol.codec import max_request_items
from weightd_protocol.errors import InvalidArgument, RequestError, Unavailable
from weightd_protocol.messages.inference import Cancel, Infer
from weightd_protocol.messages.regions import Register, Registered, Unregister

# Of the frames of a message.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

_UNIX_SOCKET_ONLY = "memory can be shared on the unix socket alone"


class InferenceApi:
    """Handles the messages by which clients have models run: requests, their cancellation, and shared memory.

    Each handler raises a `RequestError` where it refuses the message.

    Args:
        registry: the models.
        authorizer: says on whose account a request goes.
        usage_table: the accounts.
        regions: the memory that clients have registered.
        responses: sends replies, and settles the accounts of requests that end.
        memory_budget: what is kept for clients.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        authorizer: Authorizer,
        usage_table: UsageTable,
        regions: RegionRegistry,
        responses: ClientResponses,
        memory_budget: MemoryBudget,
    ) -> None:
        self._registry = registry
        self._authorizer = authorizer
        self._usage_table = usage_table
        self._regions = regions
        self._responses = responses
        self._memory_budget = memory_budget
        # A worker may still give an answer that the daemon before this one has asked for: no number is used twice.
        self._request_numbers = itertools.count(time.time_ns() // 1000)

    def on_infer(self, connection: ClientConnection, message: Infer, frames: Sequence[Any], now: float) -> None:
        """Authorize and validate a request, and give it to the dispatcher of its model."""
        client, description, parameters = connection.key, message.description, message.parameters
        own_tenant = connection.tenant
        if own_tenant is not None and parameters.tenant is None and INFER in own_tenant.config.may:
            tenant, origin = own_tenant, connection.origin
        else:
            tenant, origin = self._authorizer.authorize_infer(connection, parameters.tenant, now)
        registry = self._registry
        name = description.model_name
        model = registry.models.get(name)
        if model is None or not (tenant.known_models.get(name) or tenant.can_see(name)):
            raise registry.not_found(name, tenant)
        if registry.is_closed:
            raise Unavailable("weightd is stopping")
        config, timeout = model.config, parameters.timeout_us
        priority_level = 0
        if parameters.priority or config.priority_levels > 1 or tenant.config.priority_max:
            priority_level = _priority_level(parameters.priority, config, tenant.config)
        locations = NO_LOCATIONS if parameters.regions is None else self._locate(connection, message)
        tensors = frames[_TENSOR_FRAMES]
        nbytes = sum(map(len, tensors))
        usage = self._usage_table.usage_of(tenant.name, name)
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
            usage=usage,
            priority_level=priority_level,
            buffered_bytes=nbytes + OVERHEAD_BYTES,
        )
        usage.admit(tenant.quota, tenant.config, description, nbytes)
        reserved_bytes = 0
        try:
            if not self._memory_budget.try_reserve(client, request.buffered_bytes):
                self._responses.reserve_freed(request)
            reserved_bytes = request.buffered_bytes
            model.dispatcher.infer(request, now)
        except RequestError:
            usage.withdraw(tenant.quota, nbytes)
            self._memory_budget.release(client, reserved_bytes)
            raise
        connection.pending_requests += 1

    def on_cancel(self, connection: ClientConnection, message: Cancel, frames: Sequence[Any], now: float) -> None:
        """End a request of the client, wherever it is."""
        for each in self._registry.all_models():
            each.dispatcher.cancel(connection.key, message.id, now)

    def on_register(self, connection: ClientConnection, message: Register, frames: Sequence[Any], now: float) -> None:
        """Register memory whose descriptor came with the message."""
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
        """Give a region up."""
        self._regions.unregister(connection.key, message.region)

    def on_disconnect(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        for model in self._registry.all_models():
            model.dispatcher.on_disconnect(client, now)

    def max_description_items(self, tenant: Tenant, leading_fields: Mapping[str, Any]) -> int | None:
        """Return how many items a long description may have by the signature of its model, None while that is unknown.

        Raises:
            RequestError: the description does not begin with the name of a model that exists for the tenant.
        """
        name = leading_fields.get("model_name")
        if type(name) is not str:
            text = f"expected model_name first in more than {preview.SHORT_BYTES} bytes, before lists and maps"
            raise InvalidArgument(f"infer: description: {text}")
        if tenant.config.acts_for and not self._registry.is_visible(name, tenant):
            # It may exist for the tenant that the message names.
            return None
        signature = self._registry.find(name, tenant).dispatcher.signature.built
        return None if signature is None else max_request_items(len(signature.inputs), len(signature.outputs))

    def _locate(self, connection: ClientConnection, message: Infer) -> TensorLocations:
        """Return where the tensors are that a request has in shared memory."""
        regions = message.parameters.regions
        if regions is None:
            return NO_LOCATIONS
        if not connection.identity.is_direct and (regions.inputs or regions.outputs):
            raise InvalidArgument(f"parameters.regions: {_UNIX_SOCKET_ONLY}")
        return self._regions.locate(connection.key, regions, message.description.inputs)


def _priority_level(priority: int | None, model: ModelConfig, tenant: TenantConfig) -> int:
    """Return how many levels of priority come before that of a request."""
    if not priority:
        return max(model.default_level, tenant.priority_max) - 1
    if priority > model.priority_levels:
        expected = f"expected at most priority_levels of the model, {model.priority_levels}, got {priority}"
        raise InvalidArgument(f"parameters.priority: {expected}")
    if priority < tenant.priority_max:
        text = f"parameters.priority: priority_max of this tenant is {tenant.priority_max}, got {priority}"
        raise QuotaExceeded("priority_max", text)
    return priority - 1
