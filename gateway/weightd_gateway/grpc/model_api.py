"""Methods of `inference.GRPCInferenceService` except inference: health, metadata, statistics and shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightd_gateway import oip_view
from weightd_gateway.daemon_client import DaemonClient
from weightd_gateway.grpc.handlers import Handler, Method, RpcContext, RpcHandlers, Unimplemented
from weightd_gateway.grpc.requests import check_local, model_of
from weightd_gateway.grpc.schema import INFERENCE
from weightd_gateway.grpc.wire_format import checked_parser
from weightd_gateway.oip_view import View
from weightd_gateway.system_shared_memory import RegisteredRegions
from weightd_protocol.errors import InvalidArgument, Unavailable

# Names of the methods without authentication, because health probes have no token.
_UNAUTHENTICATED = frozenset({"ServerLive", "ServerReady"})

# The trace settings of a Triton server whose tracing is off. In the response, each value is a list of one text.
_TRACE_SETTINGS = {
    "trace_level": "OFF",
    "trace_rate": "0",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_LOG_SETTINGS = {
    "log_file": {"string_param": ""},
    "log_info": {"bool_param": True},
    "log_warning": {"bool_param": True},
    "log_error": {"bool_param": True},
    "log_verbose_level": {"uint32_param": 0},
    "log_format": {"string_param": "default"},
}

_READ_ONLY_SETTING = "this setting is read-only; the operator sets it in the configuration of weightd"


class ModelApi:
    """Implements the methods that do not run a model.

    Args:
        daemon_client: the client of the daemon.
        regions: the shared-memory regions that callers have registered.
        has_shared_memory: whether callers may register regions.
        has_model_control: whether callers may load and unload models.
    """

    def __init__(
        self,
        daemon_client: DaemonClient,
        regions: RegisteredRegions,
        *,
        has_shared_memory: bool,
        has_model_control: bool,
    ) -> None:
        self._daemon_client = daemon_client
        self._regions = regions
        self._has_shared_memory = has_shared_memory
        self._has_model_control = has_model_control

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return the gRPC handler of each method, by the method's name."""
        methods: Mapping[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._memory_status,
            "SystemSharedMemoryRegister": self._memory_register,
            "SystemSharedMemoryUnregister": self._memory_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }
        return {
            name: calls.unary_handler(
                name, checked_parser(INFERENCE.requests[name]), method, is_unauthenticated=name in _UNAUTHENTICATED
            )
            for name, method in methods.items()
        }

    async def _server_live(self, call: RpcContext, request: Any) -> bytes:
        return _encode("ServerLiveResponse", {"live": True})

    async def _server_ready(self, call: RpcContext, request: Any) -> bytes:
        return _encode("ServerReadyResponse", {"ready": await self._is_ready(call, "")})

    async def _model_ready(self, call: RpcContext, request: Any) -> bytes:
        model = model_of(request.name, request.version)
        return _encode("ModelReadyResponse", {"ready": await self._is_ready(call, model)})

    async def _is_ready(self, call: RpcContext, model: str) -> bool:
        try:
            return (await self._daemon_client.ready(call.caller, model)).ready
        except Unavailable:
            return False

    async def _server_metadata(self, call: RpcContext, request: Any) -> bytes:
        answer = await self._daemon_client.server(call.caller)
        return _encode(
            "ServerMetadataResponse", oip_view.server_metadata(answer, shared_memory=self._has_shared_memory)
        )

    async def _model_metadata(self, call: RpcContext, request: Any) -> bytes:
        answer = await self._daemon_client.metadata(call.caller, model_of(request.name, request.version))
        names = (await self._daemon_client.server(call.caller)).models
        return _encode("ModelMetadataResponse", oip_view.model_metadata(answer, names))

    async def _model_config(self, call: RpcContext, request: Any) -> bytes:
        answer = await self._daemon_client.metadata(call.caller, model_of(request.name, request.version))
        return _encode("ModelConfigResponse", {"config": oip_view.model_config(answer)})

    async def _model_statistics(self, call: RpcContext, request: Any) -> bytes:
        model = model_of(request.name, request.version) if request.name else ""
        metrics = await self._daemon_client.metrics(call.caller)
        return _encode("ModelStatisticsResponse", oip_view.statistics(metrics, model))

    async def _repository_index(self, call: RpcContext, request: Any) -> bytes:
        metrics = await self._daemon_client.metrics(call.caller)
        models = oip_view.repository_index(metrics, only_ready=request.ready)
        return _encode("RepositoryIndexResponse", {"models": models})

    async def _load(self, call: RpcContext, request: Any) -> bytes:
        oip_view.check_model_control(is_allowed=self._has_model_control)
        oip_view.check_load_parameters(request.parameters)
        await self._daemon_client.load(call.caller, model_of(request.model_name))
        return _encode("RepositoryModelLoadResponse", {})

    async def _unload(self, call: RpcContext, request: Any) -> bytes:
        oip_view.check_model_control(is_allowed=self._has_model_control)
        oip_view.check_load_parameters(request.parameters)
        await self._daemon_client.unload(call.caller, model_of(request.model_name))
        return _encode("RepositoryModelUnloadResponse", {})

    async def _memory_status(self, call: RpcContext, request: Any) -> bytes:
        check_local(call)
        regions = self._regions.status(call.caller, request.name)
        return _encode("SystemSharedMemoryStatusResponse", {"regions": {each["name"]: each for each in regions}})

    async def _memory_register(self, call: RpcContext, request: Any) -> bytes:
        check_local(call)
        self._regions.register(call.caller, request.name, request.key, request.offset, request.byte_size)
        return _encode("SystemSharedMemoryRegisterResponse", {})

    async def _memory_unregister(self, call: RpcContext, request: Any) -> bytes:
        check_local(call)
        self._regions.unregister(call.caller, request.name)
        return _encode("SystemSharedMemoryUnregisterResponse", {})

    async def _cuda_status(self, call: RpcContext, request: Any) -> bytes:
        return _encode("CudaSharedMemoryStatusResponse", {})

    async def _cuda_register(self, call: RpcContext, request: Any) -> bytes:
        raise Unimplemented("weightd does not support CUDA shared memory")

    async def _cuda_unregister(self, call: RpcContext, request: Any) -> bytes:
        # No CUDA region can exist, so there is nothing to remove. The call succeeds, because some clients call this
        # method before they use system shared memory.
        return _encode("CudaSharedMemoryUnregisterResponse", {})

    async def _trace_setting(self, call: RpcContext, request: Any) -> bytes:
        if request.settings:
            raise InvalidArgument(_READ_ONLY_SETTING)
        return _encode(
            "TraceSettingResponse", {"settings": {name: {"value": [value]} for name, value in _TRACE_SETTINGS.items()}}
        )

    async def _log_settings(self, call: RpcContext, request: Any) -> bytes:
        if request.settings:
            raise InvalidArgument(_READ_ONLY_SETTING)
        return _encode("LogSettingsResponse", {"settings": _LOG_SETTINGS})


def _encode(name: str, view: View) -> bytes:
    content: bytes = INFERENCE[name](**view).SerializeToString()
    return content
