from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

class Operator(ABC):
    @abstractmethod
    def mutation_positions(self, node: Any) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]: ...
    @abstractmethod
    def mutate(self, node: Any, index: int) -> Any: ...
    @classmethod
    def arguments(cls) -> Sequence[Any]: ...
    @classmethod
    @abstractmethod
    def examples(cls) -> Sequence[Example]: ...

class Example:
    pre_mutation_code: str
    post_mutation_code: str
    occurrence: int
    def __init__(self, pre_mutation_code: str, post_mutation_code: str, occurrence: int = ...) -> None: ...
