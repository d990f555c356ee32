from typing import Any

class ModelConfig:
    def __init__(self, *, batching: bool) -> None: ...

class Tensor:
    def __init__(self, *, name: str, dtype: Any, shape: tuple[int, ...]) -> None: ...
