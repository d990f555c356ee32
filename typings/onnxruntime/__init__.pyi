# The part of ONNX Runtime 1.20 that weightd uses.
from collections.abc import Mapping, Sequence
from enum import Enum
from os import PathLike
from typing import Any

from numpy.typing import NDArray

__version__: str

class GraphOptimizationLevel(Enum):
    ORT_DISABLE_ALL = ...
    ORT_ENABLE_BASIC = ...
    ORT_ENABLE_EXTENDED = ...
    ORT_ENABLE_ALL = ...

class ExecutionMode(Enum):
    ORT_SEQUENTIAL = ...
    ORT_PARALLEL = ...

class SessionOptions:
    enable_cpu_mem_arena: bool
    enable_mem_pattern: bool
    enable_mem_reuse: bool
    execution_mode: ExecutionMode
    graph_optimization_level: GraphOptimizationLevel
    inter_op_num_threads: int
    intra_op_num_threads: int
    log_severity_level: int
    logid: str
    optimized_model_filepath: str
    use_deterministic_compute: bool
    def add_session_config_entry(self, key: str, value: str, /) -> None: ...

class RunOptions:
    log_severity_level: int
    logid: str
    only_execute_path_to_fetches: bool
    terminate: bool
    def add_run_config_entry(self, key: str, value: str, /) -> None: ...

class OrtAllocatorType(Enum):
    ORT_ARENA_ALLOCATOR = ...

class OrtMemType(Enum):
    DEFAULT = ...

class OrtMemoryInfo:
    def __init__(self, name: str, kind: OrtAllocatorType, device: int, use: OrtMemType, /) -> None: ...

class OrtArenaCfg:
    def __init__(self, settings: dict[str, int], /) -> None: ...

class NodeArg:
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int | str | None]: ...  # a name or None where the model leaves a dimension open
    @property
    def type(self) -> str: ...  # "tensor(float)"

class InferenceSession:
    def __init__(
        self,
        path_or_bytes: str | bytes | PathLike[str],
        sess_options: SessionOptions | None = ...,
        providers: Sequence[str] | None = ...,
        provider_options: Sequence[dict[str, str]] | None = ...,
    ) -> None: ...
    def disable_fallback(self) -> None: ...
    def get_inputs(self) -> Sequence[NodeArg]: ...
    def get_outputs(self) -> Sequence[NodeArg]: ...
    def get_providers(self) -> Sequence[str]: ...
    # Sequences and maps are possible too; a model with such outputs is refused for its signature.
    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, NDArray[Any]],
        run_options: RunOptions | None = ...,
    ) -> list[NDArray[Any]]: ...

def create_and_register_allocator(memory: OrtMemoryInfo, settings: OrtArenaCfg, /) -> None: ...
def get_available_providers() -> list[str]: ...
def set_default_logger_severity(severity: int, /) -> None: ...
