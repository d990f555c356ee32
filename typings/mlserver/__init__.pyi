"""What of MLServer 1.7 the benchmark uses."""

from typing import Any

class MLModel:
    settings: Any
    name: str
