# The part of MindSpore that weightd uses.
from collections.abc import Sequence
from typing import Any

from mindspore import communication as communication
from mindspore import nn as nn
from numpy.typing import NDArray

__version__: str

GRAPH_MODE: int

def set_context(**kwargs: int | str) -> None: ...
def load(file_name: str) -> Any: ...

class Tensor:
    def __init__(self, *, shape: Sequence[int | None] | None = ..., dtype: Any = ...) -> None: ...
    @staticmethod
    def from_numpy(array: NDArray[Any]) -> Tensor: ...
    def asnumpy(self) -> NDArray[Any]: ...
