"""Calls other than inference. Each function checks its arguments and returns a `Query`."""

from __future__ import annotations

from typing import Any, Callable, Generic, Type, TypeVar

from weightd import arguments
from weightd_protocol.messages.control import (
    Load,
    LoadResponse,
    ModelMetadata,
    ModelMetadataResponse,
    ModelReady,
    ReadyResponse,
    Reload,
    ReloadResponse,
    Rollout,
    RolloutResponse,
    ServerMetadata,
    ServerMetadataResponse,
    ServerReady,
    Unload,
    Update,
    UpdateResponse,
)
from weightd_protocol.messages.events import Events, EventsResponse, Logs, LogsResponse
from weightd_protocol.messages.metrics import Metrics, MetricsResponse
from weightd_protocol.messages.status import Status, StatusResponse
from weightd_protocol.messages.types import ClientMessage

R = TypeVar("R")


class Query(Generic[R]):
    """A request other than inference, before the client adds its id.

    Args:
        message_type: the type of the request message.
        response_type: the type of the response message.
        fields: the values of the message's fields, from the first one after the id.
        takes_tenant: whether the message has a last field for the tenant on whose behalf it is sent.
    """

    __slots__ = ("fields", "message_type", "response_type", "takes_tenant")

    def __init__(
        self,
        message_type: Callable[..., ClientMessage],
        response_type: Type[R],
        *fields: Any,
        takes_tenant: bool = False,
    ) -> None:
        self.message_type = message_type
        self.response_type = response_type
        self.fields = fields
        self.takes_tenant = takes_tenant


SERVER = Query(ServerMetadata, ServerMetadataResponse, takes_tenant=True)
STATUS = Query(Status, StatusResponse, takes_tenant=True)
METRICS = Query(Metrics, MetricsResponse, takes_tenant=True)


def ready(model: str) -> Query[ReadyResponse]:
    """Return the query for the readiness of a model; "" asks for the readiness of all models."""
    model = arguments.parse_text("model", model)
    if not model:
        return Query(ServerReady, ReadyResponse, takes_tenant=True)
    return Query(ModelReady, ReadyResponse, model, takes_tenant=True)


def metadata(model: str) -> Query[ModelMetadataResponse]:
    """Return the query for the signature of a model."""
    return Query(ModelMetadata, ModelMetadataResponse, arguments.parse_text("model", model), takes_tenant=True)


def events(after: int, model: str) -> Query[EventsResponse]:
    """Return the query for the events that follow event number `after`."""
    return Query(Events, EventsResponse, after, arguments.parse_text("model", model))


def logs(model: str, process: str, lines: int) -> Query[LogsResponse]:
    """Return the query for the last log lines of a model's processes."""
    names = arguments.parse_text("model", model), arguments.parse_text("process", process)
    return Query(Logs, LogsResponse, *names, lines)


def load(model: str, action: str, *, wait: bool) -> Query[LoadResponse]:
    """Return the request to load a model."""
    name, checked = arguments.parse_text("model", model), arguments.parse_text("action", action)
    return Query(Load, LoadResponse, name, checked, wait, takes_tenant=True)


def unload(model: str, *, wait: bool) -> Query[LoadResponse]:
    """Return the request to unload a model."""
    return Query(Unload, LoadResponse, arguments.parse_text("model", model), wait, takes_tenant=True)


def reload(*, dry_run: bool) -> Query[ReloadResponse]:
    """Return the request to read the daemon's configuration file again."""
    return Query(Reload, ReloadResponse, dry_run)


def rollout(model: str, action: str, version: int, percent: float) -> Query[RolloutResponse]:
    """Return the request to change the shares of a model's versions."""
    names = arguments.parse_text("model", model), arguments.parse_text("action", action)
    return Query(Rollout, RolloutResponse, *names, version, float(percent))


def update(model: str, path: str, weights: str, *, rollback: bool) -> Query[UpdateResponse]:
    """Return the request to serve another model file, other weights, or the previous version."""
    name = arguments.parse_text("model", model)
    files = arguments.parse_text("path", path), arguments.parse_text("weights", weights)
    return Query(Update, UpdateResponse, name, *files, rollback)
