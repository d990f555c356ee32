from typing import Any

class InferenceRequest:
    inputs: list[Any]

class InferenceResponse:
    def __init__(self, *, model_name: str, outputs: list[Any]) -> None: ...
