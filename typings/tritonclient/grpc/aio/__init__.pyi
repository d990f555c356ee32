from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from tritonclient.grpc import InferInput as InferInput
from tritonclient.grpc import InferRequestedOutput as InferRequestedOutput
from tritonclient.grpc import InferResult as InferResult
from tritonclient.utils import InferenceServerException

class InferenceServerClient:
    def __init__(self, url: str, **options: Any) -> None: ...
    async def __aenter__(self) -> InferenceServerClient: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def infer(self, model_name: str, inputs: Sequence[InferInput], **options: Any) -> InferResult: ...
    def stream_infer(
        self, inputs_iterator: AsyncIterator[dict[str, Any]], **options: Any
    ) -> AsyncIterator[tuple[InferResult, InferenceServerException | None]]: ...
    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]: ...
