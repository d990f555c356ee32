"""The signature of a model, which describes its inputs and outputs, and the checks of requests against the signature.

A request that passes the checks is safe even for an engine that does not check its inputs. While the first generation
loads, the signature is unknown: metadata requests wait, and inference requests are checked later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.scheduling.batching.policy import next_size
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.results import ResponseSink
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Built


class RowLimits(NamedTuple):
    """The limits for the rows of a request.

    Attributes:
        max_rows: the maximum number of rows; 0 for any number.
        limit_name: the configuration key that sets the limit.
        sizes: the numbers of rows to which a request, or the last part of a split one, is padded; empty for no padding.
    """

    max_rows: int = 0
    limit_name: str = ""
    sizes: tuple[int, ...] = ()

    def padded_rows(self, rows: int) -> int:
        """Return how many rows the model receives for a request with `rows` rows, including padding."""
        return next_size(rows, self.sizes) or max(self.sizes, default=rows)


# Maximum number of checked descriptions in the cache. The protocol's decoder caches the same number.
_MAX_CHECKED = 1024

NO_ROW_LIMITS = RowLimits()

# Maximum number of dimensions of all example shapes together. With names of maximum length, the header of a reply has
# no room for more.
_MAX_DIMS = 256


class MetadataRequest(NamedTuple):
    """A request for the metadata of a model.

    Attributes:
        client: the client that sent the request.
        request_id: the id of the request.
        user: the client's user or tenant. If too many metadata requests are queued, the user with the most is rejected.
    """

    client: bytes
    request_id: str
    user: str = ""


class Signature:
    """The signature that all generations of a model have in common.

    Args:
        row_limits: the limits for the rows of a request.

    Attributes:
        built: the holder's report with the signature; None while the first holder loads.
        checked: the checks so far, by the `id()` of the checked description: the description, and the result of
            `check_request` for it. The entry keeps the description so that no other object gets the same `id()`.
    """

    def __init__(self, row_limits: RowLimits = NO_ROW_LIMITS) -> None:
        self._row_limits = row_limits
        self.built: Built | None = None
        self._inputs: dict[str, TensorSignature] = {}
        self._outputs: Sequence[str] = ()
        self.checked: dict[int, tuple[RequestDescription, RequestDescription]] = {}

    def set_row_limits(self, row_limits: RowLimits) -> None:
        """Change the limits for the rows of a request."""
        self._row_limits = row_limits
        self.checked.clear()

    def on_built(self, built: Built) -> None:
        """Record the signature that a holder has reported."""
        self.built = built
        self._inputs = {each.name: each for each in built.inputs}
        self._outputs = [each.name for each in built.outputs]
        self.checked.clear()

    def difference(self, built: Built) -> str:
        """Return how the signature that another holder has reported differs from this one for clients, or ""."""
        return describe_difference(self.built, built) if self.built is not None else ""

    def check_request(self, description: RequestDescription) -> RequestDescription:
        """Check a request against the signature. If no signature is known yet, `check_waiting` checks it later.

        Returns:
            The request as the engine is to receive it: a scalar has the shape that the model declares.

        Raises:
            InvalidArgument: the model does not have such inputs or outputs.
        """
        cached = self.checked.get(id(description))
        if cached is not None:
            return cached[1]
        if self.built is None:
            return description
        check_inputs(self._inputs, description.inputs)
        declared = with_declared_shapes(self._inputs, description)
        check_rows(self.built, self._row_limits, declared.inputs)
        check_gears(self.built, self._row_limits, declared.inputs)
        if description.outputs is not None:
            check_outputs(self._outputs, description.outputs)
        if len(self.checked) >= _MAX_CHECKED:
            self.checked.clear()
        self.checked[id(description)] = description, declared
        return declared

    def check_waiting(self, requests: Sequence[Request]) -> dict[int, InvalidArgument]:
        """Check requests that arrived before the signature was known; return the errors of invalid ones, by number."""
        errors: dict[int, InvalidArgument] = {}
        for request in requests:
            try:
                request.description = self.check_request(request.description)
            except InvalidArgument as error:
                errors[request.number] = error
        return errors


class MetadataReplies:
    """Answers metadata requests, at once or when the signature is known.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        signature: the signature of the model.
        response_sink: sends the replies.

    Attributes:
        make_unavailable: makes the error of requests while the model is unavailable; None while it is available.
    """

    def __init__(self, name: str, config: ModelConfig, signature: Signature, response_sink: ResponseSink) -> None:
        self._name = name
        self._config = config
        self._signature = signature
        self._response_sink = response_sink
        self.make_unavailable: Callable[[], RequestError] | None = None
        self._waiting: list[MetadataRequest] = []

    def reconfigure(self, config: ModelConfig) -> None:
        """Apply a new configuration to further replies."""
        self._config = config

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits until the signature is known."""
        return bool(self._waiting)

    def request(self, request: MetadataRequest) -> None:
        """Reply to a metadata request, or queue it until the signature is known.

        Raises:
            RequestError: the model is unavailable, or too many metadata requests wait and this client's user has the
                most.
        """
        if self.make_unavailable is not None:
            raise self.make_unavailable()
        self._waiting.append(request)
        max_requests = self._config.max_queue
        if len(self._waiting) > max_requests:
            counts = Counter(each.user for each in self._waiting)
            last = max(reversed(self._waiting), key=lambda each: counts[each.user])
            self._waiting.remove(last)
            error = ResourceExhausted(
                f"{max_requests} metadata requests are already queued, most of them from this client's user"
            )
            if last == request:
                raise error
            self._response_sink.reply_error(last.client, last.request_id, error)
        self.reply_all()

    def reply_all(self) -> None:
        """Reply to all queued metadata requests, if the signature is known."""
        built = self._signature.built
        if built is None:
            return
        waiting, self._waiting = self._waiting, []
        for client, request_id, _ in waiting:
            response = ModelMetadataResponse(
                request_id,
                self._name,
                self._config.engine,
                built.inputs,
                built.outputs,
                _are_answers_exact(self._config, built),
                example_shapes(built),
            )
            self._response_sink.reply(client, response)

    def reject(self, should_reject: Callable[[bytes], bool], error: RequestError) -> None:
        """Reject the queued metadata requests of matching clients."""
        for request in self._take(should_reject):
            self._response_sink.reply_error(request.client, request.request_id, error)

    def forget(self, client: bytes) -> None:
        """Drop the queued metadata requests of a client that has disconnected."""
        if self._waiting:
            self._take(lambda each: each == client)

    def adopt(self, old: MetadataReplies) -> None:
        """Take over the queued metadata requests of the instance that this one replaces."""
        self._waiting += old._take(lambda _: True)
        self.reply_all()

    def _take(self, matches: Callable[[bytes], bool]) -> list[MetadataRequest]:
        taken = [request for request in self._waiting if matches(request.client)]
        self._waiting = [request for request in self._waiting if not matches(request.client)]
        return taken


def example_shapes(built: Built) -> tuple[tuple[int, ...], ...] | None:
    """Return a valid shape for each input; None if no input has a free dimension, or if no valid shapes are known."""
    has_free_dims = any(each.shape is None or -1 in each.shape for each in built.inputs)
    case_shapes = built.selftest_cases[0] if built.selftest_cases else {}
    shapes = tuple(case_shapes[each.name] for each in built.inputs if each.name in case_shapes)
    is_known = len(shapes) == len(built.inputs) and sum(map(len, shapes)) <= _MAX_DIMS
    return shapes if has_free_dims and is_known else None


def _are_answers_exact(config: ModelConfig, built: Built) -> bool | None:
    """Return whether answers are the same as if each request ran alone; None if each request does run alone."""
    row_support, batching, split = built.row_support, config.batching, config.split
    if row_support is None or not row_support.inputs or not row_support.outputs:
        return None
    can_differ = (batching.max_rows > 1 and not batching.exact) or (split.part_rows > 0 and not split.exact)
    return row_support.is_equal if row_support.is_equal or can_differ else None


def check_inputs(signature: Mapping[str, TensorSignature], inputs: Sequence[TensorSpec]) -> None:
    """Check names, datatypes, ranks and dimensions against the model's inputs, by name.

    Raises:
        InvalidArgument: the text names the input, the expected and the received value.
    """
    if len(inputs) != len(signature) or {each.name for each in inputs} != set(signature):
        _raise_wrong_names(signature, inputs)
    for tensor in inputs:
        expected = signature[tensor.name]
        if tensor.datatype != expected.datatype:
            is_double = (expected.datatype, tensor.datatype) == ("FP32", "FP64")
            hint = '; in numpy, convert it with .astype("float32")' if is_double else ""
            raise InvalidArgument(f"input {tensor.name}: expected {expected.datatype}, got {tensor.datatype}{hint}")
        if not _is_shape_allowed(expected.shape, tensor.shape):
            raise InvalidArgument(
                f"input {tensor.name}: expected shape {expected.shape_text}{_hint(expected.shape)}, got"
                f" {list(tensor.shape)}"
            )


def with_declared_shapes(
    signature: Mapping[str, TensorSignature], description: RequestDescription
) -> RequestDescription:
    """Return a request that `check_inputs` has accepted, with the declared shape for each input of one element.

    Engines receive the shape that the model declares: MindSpore Lite does not treat [] and [1] alike.
    """
    inputs = tuple(
        replace(each, shape=shape) if shape is not None and _are_one_element(shape, each.shape) else each
        for each in description.inputs
        for shape in [signature[each.name].shape]
    )
    return description if inputs == description.inputs else replace(description, inputs=inputs)


def check_outputs(outputs: Collection[str], wanted: Sequence[str]) -> None:
    """Check the names of the requested outputs.

    Raises:
        InvalidArgument: the text names the output.
    """
    expected = f"expected names of {', '.join(outputs) or 'none'}"
    if not wanted:
        raise InvalidArgument(f"outputs: the list is empty; {expected}, or no such field to get all")
    for name in wanted:
        if name not in outputs:
            raise InvalidArgument(f"outputs: {name} is not an output of the model; {expected}")
    if len({*wanted}) < len(wanted):
        raise InvalidArgument(f"outputs: a name is given twice in {', '.join(wanted)}")


def check_rows(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check the number of rows of a request.

    Args:
        built: the holder's report.
        limits: the row limits of the model.
        inputs: inputs that have passed `check_inputs`.

    Raises:
        InvalidArgument: the text names the input, the expected and the received value.
    """
    counted = built.row_support.inputs if limits.max_rows and built.row_support is not None else ()
    for tensor in inputs:
        if tensor.name in counted and tensor.shape[0] > limits.max_rows:
            expected = (
                f"expected at most {limits.max_rows} rows ({limits.limit_name} of the model), got {tensor.shape[0]}"
            )
            raise InvalidArgument(f"input {tensor.name}: {expected}")


def check_gears(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check the sizes of the free dimensions against the sizes that the model was converted for, if these are known.

    Args:
        built: the holder's report.
        limits: the row limits of the model. If they have sizes, rows are padded before the check.
        inputs: inputs that have passed `check_rows`.

    Raises:
        InvalidArgument: the text names the dimensions, the supported sizes and the received ones.
    """
    if not built.gears:
        return
    counted = built.row_support.inputs if built.row_support is not None else ()
    shapes = {
        each.name: (limits.padded_rows(each.shape[0]), *each.shape[1:]) if each.name in counted else each.shape
        for each in inputs
    }
    free = [(each.name, axis) for each in built.inputs for axis, dim in enumerate(each.shape or ()) if dim == -1]
    sizes = tuple(shapes[name][axis] for name, axis in free)
    if sizes not in built.gears:
        raise InvalidArgument(
            f"inputs: the model was converted for some sizes of {', '.join(f'{name}[{axis}]' for name, axis in free)} "
            f"only: expected {_format_gears(built)}, got {_format_sizes(sizes)}"
        )


def _format_sizes(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _hint(expected: Sequence[int] | None) -> str:
    if expected is None:
        return ", any sizes from 1"
    if not expected:
        return " (one element: a scalar, or any shape in which each size is 1)"
    return " (-1: any size from 1)" if -1 in expected else ""


def _is_shape_allowed(expected: Sequence[int] | None, shape: Sequence[int]) -> bool:
    if expected is None:
        return all(shape)
    if _are_one_element(expected, shape):
        return True
    return len(shape) == len(expected) and all(
        dim == wanted or (wanted == -1 and dim > 0) for wanted, dim in zip(expected, shape, strict=False)
    )


def _are_one_element(expected: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether one of the two shapes is a scalar's, and the other shape has exactly one element.

    A free dimension does not count as 1: it may be the number of rows, which a scalar does not have.
    """
    return not (expected and shape) and all(dim == 1 for dim in (*expected, *shape))


def _raise_wrong_names(signature: Mapping[str, TensorSignature], inputs: Sequence[TensorSpec]) -> None:
    names = [each.name for each in inputs]
    problems = [f"{name} is missing" for name in signature if name not in names]
    problems += [f"{name} is not an input of the model" for name in names if name not in signature]
    problems += [f"{name} is given twice" for name in sorted({name for name in names if names.count(name) > 1})]
    raise InvalidArgument(f"inputs: {', '.join(problems)}; expected {', '.join(signature) or 'none'}")


def describe_difference(old: Built, new: Built) -> str:
    """Return how the signature of `new` differs from the signature of `old` in a way that clients notice, or ""."""
    for kind, old_tensors, new_tensors in (("inputs", old.inputs, new.inputs), ("outputs", old.outputs, new.outputs)):
        if {each.name: each for each in old_tensors} != {each.name: each for each in new_tensors}:
            return f"{kind}: expected {_format_tensors(old_tensors)}, got {_format_tensors(new_tensors)}"
    if new.gears and not (old.gears and {*old.gears} <= {*new.gears}):
        return f"sizes: expected {_format_gears(old) or 'any'}, got {_format_gears(new)}"
    return ""


def _format_gears(built: Built) -> str:
    return "; ".join(map(_format_sizes, built.gears))


def _format_tensors(tensors: Sequence[TensorSignature]) -> str:
    return ", ".join(f"{each.name} {each.datatype} {each.shape_text}" for each in tensors) or "none"
