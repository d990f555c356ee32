"""Handlers of queries about the daemon and its models: metadata, readiness, status, metrics and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.responses import ClientResponses
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.tenants.tenant import Viewer
from weightd_daemon.transport.connection import ClientConnection
from weightd_protocol.codec import clip
from weightd_protocol.messages.control import (
    ModelMetadata,
    ModelReady,
    ReadyResponse,
    ServerMetadata,
    ServerMetadataResponse,
    ServerReady,
)
from weightd_protocol.messages.events import Events, Logs
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.status import Status
from weightd_protocol.version import EXTENSIONS, VERSION


class StatusReporter(Protocol):
    """Interface for reporting the daemon's state to clients. Each method only starts to collect the state.

    The reply is sent later, when the state is complete.

    Each method raises a `RequestError` if it refuses the query.
    """

    def report_status(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Send the state of the models and processes."""

    def report_metrics(self, requester: MetadataRequest, viewer: Viewer) -> None:
        """Send the metrics."""

    def report_events(self, requester: MetadataRequest, request: Events) -> None:
        """Send the latest events."""

    def report_logs(self, client: bytes, request: Logs) -> None:
        """Send the log output of a model's processes."""


class StatusApi:
    """Handlers of queries. Each handler raises a `RequestError` if it refuses the message.

    Args:
        lookup: finds the models that clients name.
        authorizer: determines what a client may see.
        reporter: collects the requested state and sends it later.
        responses: sends replies.
    """

    def __init__(
        self,
        lookup: ModelLookup,
        authorizer: Authorizer,
        reporter: StatusReporter,
        responses: ClientResponses,
    ) -> None:
        self._lookup = lookup
        self._registry = lookup.registry
        self._authorizer = authorizer
        self._reporter = reporter
        self._responses = responses

    def on_model_metadata(
        self, connection: ClientConnection, message: ModelMetadata, frames: Sequence[Any], now: float
    ) -> None:
        """Send a model's signature, as soon as it is known."""
        viewer = self._authorizer.charge_viewer(connection, message.tenant, now)
        model = self._lookup.find(message.model_name, viewer.tenant)
        if model.loading.is_unloaded and model.dispatcher.signature.built is None:
            model.loading.load_on_demand(viewer.tenant.name)
        model.dispatcher.metadata.request(MetadataRequest(connection.key, message.id, connection.user))

    def on_server_metadata(
        self, connection: ClientConnection, message: ServerMetadata, frames: Sequence[Any], now: float
    ) -> None:
        """Send the daemon's version and the names of the models."""
        viewer = self._authorizer.charge_viewer(connection, message.tenant, now)
        models = tuple(self._lookup.visible_names(viewer.tenant))
        self._responses.reply(
            connection.key, ServerMetadataResponse(message.id, "weightd", VERSION, models, EXTENSIONS)
        )

    def on_ready(
        self, connection: ClientConnection, message: ServerReady | ModelReady, frames: Sequence[Any], now: float
    ) -> None:
        """Send whether a model is ready, or for the server, whether all models except the unloaded ones are ready."""
        viewer = self._authorizer.charge_viewer(connection, message.tenant, now).tenant
        if isinstance(message, ModelReady):
            model = self._lookup.find(message.model_name, viewer)
            # An unloaded model that loads on demand counts as ready: a request loads it and is answered afterwards.
            models = [] if model.loading.is_unloaded and model.config.is_on_demand else [model]
        else:
            models = [each for each in self._lookup.visible_models(viewer).values() if not each.loading.is_unloaded]
        reasons = (
            ["weightd is stopping"]
            if self._registry.is_closed
            else [reason for each in models if (reason := each.readiness.unready_reason(now))]
        )
        self._responses.reply(connection.key, ReadyResponse(message.id, not reasons, clip("; ".join(reasons))))

    def on_status(self, connection: ClientConnection, message: Status, frames: Sequence[Any], now: float) -> None:
        """Start to collect the state of the models and processes; the reply is sent later."""
        viewer = self._authorizer.charge_viewer(connection, message.tenant, now)
        self._reporter.report_status(_requester(connection, message), viewer)

    def on_metrics(self, connection: ClientConnection, message: Metrics, frames: Sequence[Any], now: float) -> None:
        """Start to collect the metrics; the reply is sent later."""
        viewer = self._authorizer.charge_viewer(connection, message.tenant, now)
        self._reporter.report_metrics(_requester(connection, message), viewer)

    def on_events(self, connection: ClientConnection, message: Events, frames: Sequence[Any], now: float) -> None:
        """Start to collect the requested events; the reply is sent later."""
        self._authorizer.check_status(connection, "events")
        self._reporter.report_events(MetadataRequest(connection.key, message.id, connection.user), message)


def _requester(connection: ClientConnection, message: Status | Metrics) -> MetadataRequest:
    """Return the requester of a query: it counts as the tenant that the message names, or else as the client's user."""
    user = connection.user if message.tenant is None else f"tenant {message.tenant}"
    return MetadataRequest(connection.key, message.id, user)
