from collections.abc import Mapping
from typing import Any

class Cluster:
    address: str
    def __init__(
        self,
        initialize_head: bool = ...,
        *,
        head_node_args: Mapping[str, Any] | None = ...,
        shutdown_at_exit: bool = ...,
    ) -> None: ...
    def add_node(self, **node_args: Any) -> Any: ...
    def remove_node(self, node: Any, allow_graceful: bool = ...) -> None: ...
    def shutdown(self) -> None: ...
