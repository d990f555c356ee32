from collections.abc import Mapping
from typing import Any

class ServeDeploySchema:
    @classmethod
    def model_validate(cls, content: Mapping[str, Any]) -> ServeDeploySchema: ...
