from collections.abc import Callable
from typing import Any

from pytriton.model_config import ModelConfig, Tensor

class TritonConfig:
    def __init__(
        self, *, http_address: str, http_port: int, grpc_address: str, grpc_port: int, metrics_port: int
    ) -> None: ...

class Triton:
    def __init__(self, *, config: TritonConfig) -> None: ...
    def __enter__(self) -> Triton: ...
    def __exit__(self, *_: object) -> None: ...
    def bind(
        self,
        *,
        model_name: str,
        infer_func: Callable[[Any], Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
        config: ModelConfig,
    ) -> None: ...
    def serve(self) -> None: ...
