# What protoc generates of Triton's files: each name is a message class.
from typing import Any

def __getattr__(name: str) -> Any: ...
