from typing import Any

from cosmic_ray.operators.operator import Operator

OPERATOR_PROVIDERS: dict[str, Any]

def get_operator(name: str) -> type[Operator]: ...
def operator_names() -> tuple[str, ...]: ...
