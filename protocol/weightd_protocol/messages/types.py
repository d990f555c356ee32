"""Tables of the messages between clients and the daemon, by the name of the message type."""

from typing import Dict, Type, Union

from weightd_protocol.messages.channels import (
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    OpenChannel,
    RequestAdopted,
    RequestLost,
)
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
from weightd_protocol.messages.inference import Cancel, Error, Infer, InferResponse
from weightd_protocol.messages.metrics import Metrics, MetricsResponse
from weightd_protocol.messages.regions import Register, Registered, Released, Unregister
from weightd_protocol.messages.status import Status, StatusResponse

ClientMessage = Union[
    Infer,
    Cancel,
    OpenChannel,
    Register,
    Unregister,
    ServerReady,
    ModelReady,
    ServerMetadata,
    ModelMetadata,
    Status,
    Metrics,
    Events,
    Logs,
    Load,
    Unload,
    Update,
    Rollout,
    Reload,
]
DaemonMessage = Union[
    InferResponse,
    Error,
    ChannelOpened,
    ChannelExtended,
    ChannelEnded,
    RequestAdopted,
    RequestLost,
    Registered,
    Released,
    ReadyResponse,
    ServerMetadataResponse,
    ModelMetadataResponse,
    StatusResponse,
    MetricsResponse,
    EventsResponse,
    LogsResponse,
    LoadResponse,
    UpdateResponse,
    RolloutResponse,
    ReloadResponse,
]

FROM_CLIENT: Dict[str, Type[ClientMessage]] = {
    "infer": Infer,
    "cancel": Cancel,
    "open_channel": OpenChannel,
    "register": Register,
    "unregister": Unregister,
    "server_ready": ServerReady,
    "model_ready": ModelReady,
    "server_metadata": ServerMetadata,
    "model_metadata": ModelMetadata,
    "status": Status,
    "metrics": Metrics,
    "events": Events,
    "logs": Logs,
    "load": Load,
    "unload": Unload,
    "update": Update,
    "rollout": Rollout,
    "reload": Reload,
}

# Messages without a response. A response to `cancel` would be a second response to the cancelled request.
MESSAGES_WITHOUT_REPLY = frozenset(["cancel", "unregister"])
TO_CLIENT: Dict[str, Type[DaemonMessage]] = {
    "infer_response": InferResponse,
    "error": Error,
    "channel_opened": ChannelOpened,
    "channel_extended": ChannelExtended,
    "channel_ended": ChannelEnded,
    "request_adopted": RequestAdopted,
    "request_lost": RequestLost,
    "registered": Registered,
    "released": Released,
    "ready_response": ReadyResponse,
    "server_metadata_response": ServerMetadataResponse,
    "model_metadata_response": ModelMetadataResponse,
    "status_response": StatusResponse,
    "metrics_response": MetricsResponse,
    "events_response": EventsResponse,
    "logs_response": LogsResponse,
    "load_response": LoadResponse,
    "update_response": UpdateResponse,
    "rollout_response": RolloutResponse,
    "reload_response": ReloadResponse,
}
