"""Models as callable objects, and the `map` function, which limits the number of requests in progress."""

from __future__ import annotations

import contextlib
from collections import abc, deque
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Deque,
    Dict,
    Generator,
    Iterable,
    Mapping,
    Optional,
    Tuple,
    Union,
    overload,
)

from weightd.pending import Pending, Uncopied
from weightd_protocol.errors import InvalidArgument, WeightdError
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.schema import describe_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.inputs import Inputs, Value

DEFAULT_IN_FLIGHT = 32

# Maximum `in_flight`. By default a model's queue in the daemon holds no more than 1024 requests. The client keeps the
# responses of all requests in flight in memory.
MAX_IN_FLIGHT = 1024


class PendingOutput(Pending):
    """A request in progress that `Model.submit` has sent."""

    __slots__ = ()

    def result(self) -> Any:
        """Wait for the response, as `Pending.result`. Return it in the form in which calling the `Model` returns it."""
        return _unwrap_single(self._wait())


class Model(Uncopied):
    """A model as a callable object. `Client.model` creates it.

    ::

        resnet50 = client.model("resnet50")
        scores = resnet50(images)

    Attributes:
        name: the model's name in the daemon's configuration.
    """

    def __init__(
        self,
        name: str,
        infer: Callable[[Any], Dict[str, Any]],
        submit: Callable[[Any], Pending],
        map_inputs: Callable[..., Generator[Dict[str, Any], None, None]],
        metadata: Callable[..., ModelMetadataResponse],
    ) -> None:
        self.name = name
        self._infer = infer
        self._submit = submit
        self._map = map_inputs
        self._metadata = metadata

    @overload
    def __call__(self, __inputs: Inputs) -> Any: ...

    @overload
    def __call__(self, **inputs: Value) -> Any: ...

    def __call__(self, *alone: Any, **named: Any) -> Any:
        """Run the model. Give inputs by name as keyword arguments, or one argument as `inputs` of `Client.infer`.

        Returns:
            The output itself if the response has exactly one output, otherwise the outputs by name. Outputs are
            read-only numpy arrays.

        Raises:
            RequestError: as `Client.infer`.
        """
        return _unwrap_single(self._infer(_call_inputs(alone, named)))

    @overload
    def submit(self, __inputs: Inputs) -> PendingOutput: ...

    @overload
    def submit(self, **inputs: Value) -> PendingOutput: ...

    def submit(self, *alone: Any, **named: Any) -> PendingOutput:
        """Send a request without waiting for the response, as `Client.submit`.

        Give the inputs as in a call of the model.
        """
        pending = self._submit(_call_inputs(alone, named))
        return PendingOutput(pending.result, pending.done, pending.cancel)

    def map(self, inputs: Iterable[Inputs], *, in_flight: int = DEFAULT_IN_FLIGHT) -> Generator[Any, None, None]:
        """Run the model on each of `inputs`, as `Client.map`.

        For each input, yield what calling the model would return.
        """
        return _unwrap_each(self._map(inputs, in_flight=in_flight))

    def metadata(self, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return the signature of the model, as `Client.metadata`."""
        return self._metadata(timeout=timeout)


class AsyncModel(Uncopied):
    """A model as a callable object whose calls are awaited. `AsyncClient.model` creates it.

    Attributes:
        name: the model's name in the daemon's configuration.
    """

    def __init__(
        self,
        name: str,
        infer: Callable[[Any], Awaitable[Dict[str, Any]]],
        map_inputs: Callable[..., AsyncGenerator[Dict[str, Any], None]],
        metadata: Callable[..., Awaitable[ModelMetadataResponse]],
    ) -> None:
        self.name = name
        self._infer = infer
        self._map = map_inputs
        self._metadata = metadata

    @overload
    async def __call__(self, __inputs: Inputs) -> Any: ...

    @overload
    async def __call__(self, **inputs: Value) -> Any: ...

    async def __call__(self, *alone: Any, **named: Any) -> Any:
        """Run the model, as `Model.__call__`."""
        return _unwrap_single(await self._infer(_call_inputs(alone, named)))

    def map(
        self, inputs: Union[Iterable[Inputs], AsyncIterable[Inputs]], *, in_flight: int = DEFAULT_IN_FLIGHT
    ) -> AsyncGenerator[Any, None]:
        """Run the model on each of `inputs`, as `AsyncClient.map`.

        For each input, yield what calling the model would return.
        """
        return _unwrap_each_async(self._map(inputs, in_flight=in_flight))

    async def metadata(self, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return the signature of the model, as `AsyncClient.metadata`."""
        return await self._metadata(timeout=timeout)


def _call_inputs(positional: Tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    if not positional:
        return named
    if len(positional) == 1 and not named:
        return positional[0]
    found = f"{len(positional)} without a name" + (f" and {', '.join(named)}" if named else "")
    raise InvalidArgument(f"inputs: expected inputs by name, as in model(x=array), or one without a name, got {found}")


def _unwrap_single(outputs: Dict[str, NDArray[Any]]) -> Any:
    if len(outputs) != 1:
        return outputs
    [output] = outputs.values()
    return output


def _unwrap_each(results: Generator[Dict[str, Any], None, None]) -> Generator[Any, None, None]:
    try:
        for outputs in results:
            yield _unwrap_single(outputs)
    finally:
        results.close()


async def _unwrap_each_async(results: AsyncGenerator[Dict[str, Any], None]) -> AsyncGenerator[Any, None]:
    try:
        async for outputs in results:
            yield _unwrap_single(outputs)
    finally:
        await results.aclose()


# --- map -------------------------------------------------------------------------------------------------------------


def check_map_arguments(inputs: object, in_flight: Any, iterable_types: Tuple[type, ...]) -> None:
    """Check the arguments of `map`.

    Raises:
        InvalidArgument: `in_flight` is out of range, `inputs` is an instance of none of `iterable_types`, or `inputs`
            is a mapping or a string.
    """
    if not (type(in_flight) is int and 1 <= in_flight <= MAX_IN_FLIGHT):
        raise InvalidArgument(
            f"in_flight: expected an integer from 1 to {MAX_IN_FLIGHT}, got {describe_value(in_flight)}"
        )
    kind = type(inputs)
    if issubclass(kind, (abc.Mapping, str)) or not issubclass(kind, iterable_types):
        raise InvalidArgument(f"inputs: expected an iterable of inputs, as in [array, array], got {kind.__name__}")


def map_ordered(
    submit: Callable[[Inputs], Pending], inputs: Iterable[Inputs], in_flight: int
) -> Generator[Any, None, None]:
    """Submit a request for each of `inputs`, and yield the responses in the order of the inputs.

    When the generator ends for any reason, it cancels the requests in progress.
    """
    pending_requests: Deque[Pending] = deque()
    try:
        for each in inputs:
            pending_requests.append(submit(each))
            while pending_requests and (len(pending_requests) == in_flight or pending_requests[0].done()):
                yield _pop_first_result(pending_requests)
        while pending_requests:
            yield _pop_first_result(pending_requests)
    finally:
        for pending in pending_requests:
            with contextlib.suppress(WeightdError):
                pending.cancel()


def _pop_first_result(pending_requests: Deque[Pending]) -> Any:
    """Wait for the response to the oldest request, and remove the request from `pending_requests`.

    After that, only the caller keeps the response alive.
    """
    answer = pending_requests[0].result()
    pending_requests.popleft()
    return answer
