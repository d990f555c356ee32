from typing import Any

DESCRIPTOR: Any
