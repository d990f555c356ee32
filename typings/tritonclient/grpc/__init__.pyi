from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2 as model_config_pb2
from tritonclient.grpc import service_pb2 as service_pb2
from tritonclient.utils import InferenceServerException

class InferInput:
    def __init__(self, name: str, shape: Sequence[int], datatype: str) -> None: ...
    def set_data_from_numpy(self, input_tensor: NDArray[Any]) -> InferInput: ...
    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> InferInput: ...

class InferRequestedOutput:
    def __init__(self, name: str, class_count: int = 0) -> None: ...
    def set_shared_memory(self, region_name: str, byte_size: int, offset: int = 0) -> None: ...

class InferResult:
    def as_numpy(self, name: str) -> NDArray[Any]: ...
    def get_output(self, name: str, as_json: bool = False) -> Any: ...
    def get_response(self, as_json: bool = False) -> Any: ...

class CallContext:
    def cancel(self) -> None: ...

class KeepAliveOptions:
    def __init__(
        self,
        keepalive_time_ms: int = ...,
        keepalive_timeout_ms: int = ...,
        keepalive_permit_without_calls: bool = ...,
        http2_max_pings_without_data: int = ...,
    ) -> None: ...

_Done = Callable[[InferResult, InferenceServerException | None], None]

# Methods of which each takes a name, and gives a message.
class InferenceServerClient:
    def __init__(self, url: str, **options: Any) -> None: ...
    def __enter__(self) -> InferenceServerClient: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def infer(
        self,
        model_name: str,
        inputs: Sequence[InferInput],
        model_version: str = "",
        outputs: Sequence[InferRequestedOutput] | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        timeout: int | None = None,
        client_timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        compression_algorithm: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> InferResult: ...
    def async_infer(
        self, model_name: str, inputs: Sequence[InferInput], callback: _Done, **options: Any
    ) -> CallContext: ...
    def start_stream(self, callback: _Done, stream_timeout: float | None = None) -> None: ...
    def async_stream_infer(self, model_name: str, inputs: Sequence[InferInput], **options: Any) -> None: ...
    def stop_stream(self, cancel_requests: bool = False) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., Any]: ...
