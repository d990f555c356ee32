# The part of atheris 3.0 that tests/fuzz uses.
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

def instrument_imports(
    include: Sequence[str] | None = ..., exclude: Sequence[str] | None = ..., enable_loader_override: bool = ...
) -> AbstractContextManager[None]: ...
def Setup(
    args: list[str],
    test_one_input: Callable[[bytes], None],
    *,
    internal_libfuzzer: bool | None = ...,
) -> list[str]: ...
def Fuzz() -> None: ...
