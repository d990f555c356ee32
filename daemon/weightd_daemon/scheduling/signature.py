"""The signature of a model: what it takes and gives, and whether a request's inputs are that.

A request that passes the check cannot harm an engine that checks nothing. While the first generation loads, the
signature is unknown: clients that ask for it wait, and requests are checked later.
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
    """How many rows a request may have.

    Attributes:
        max_rows: 0: any number.
        limit_name: the key of the model that says so.
        sizes: to which they are padded, or their last part is; none: they are not.
    """

    max_rows: int = 0
    limit_name: str = ""
    sizes: tuple[int, ...] = ()

    def padded_rows(self, rows: int) -> int:
        """Return how many rows the model is given for so many."""
        return next_size(rows, self.sizes) or max(self.sizes, default=rows)


# As many as the decoder knows by their bytes.
_MAX_CHECKED = 1024

NO_ROW_LIMITS = RowLimits()

# Dimensions of all inputs together: beside names as long as they may be, no more have room in a header.
_MAX_DIMS = 256


class MetadataRequest(NamedTuple):
    """Who wants to be told.

    Attributes:
        client: who asks.
        request_id: the id of its question.
        user: on whose account it goes.
    """

    client: bytes
    request_id: str
    user: str = ""


class Signature:
    """The signature that all generations of a model have in common.

    Args:
        row_limits: how many a request may have.

    Attributes:
        built: what a holder has told of it; None while the first one loads.
        checked: the descriptions that were checked, by their identity. Each is kept, so that no other object takes its
            identity, with the one that `check_request` returns for it.
    """

    def __init__(self, row_limits: RowLimits = NO_ROW_LIMITS) -> None:
        self._row_limits = row_limits
        self.built: Built | None = None
        self._inputs: dict[str, TensorSignature] = {}
        self._outputs: Sequence[str] = ()
        self.checked: dict[int, tuple[RequestDescription, RequestDescription]] = {}

    def set_row_limits(self, row_limits: RowLimits) -> None:
        """So many rows a request may have from now on."""
        self._row_limits = row_limits
        self.checked.clear()

    def on_built(self, built: Built) -> None:
        """A holder has built the model."""
        self.built = built
        self._inputs = {each.name: each for each in built.inputs}
        self._outputs = [each.name for each in built.outputs]
        self.checked.clear()

    def difference(self, built: Built) -> str:
        """Return how what another holder has built differs so that a client would notice, or ""."""
        return describe_difference(self.built, built) if self.built is not None else ""

    def check_request(self, description: RequestDescription) -> RequestDescription:
        """Check a request against the signature; while no signature is known, `check_waiting` does so later.

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
        """Check requests that came before the signature was known; return the errors of those refused, by number."""
        errors: dict[int, InvalidArgument] = {}
        for request in requests:
            try:
                request.description = self.check_request(request.description)
            except InvalidArgument as error:
                errors[request.number] = error
        return errors


class MetadataReplies:
    """Tells clients the signature of a model, at once or when it is known.

    Args:
        name: of the model.
        config: of the model.
        signature: of the model.
        response_sink: sends the replies.

    Attributes:
        make_unavailable: makes the error of a request to a model that nobody serves; None: there is none.
    """

    def __init__(self, name: str, config: ModelConfig, signature: Signature, response_sink: ResponseSink) -> None:
        self._name = name
        self._config = config
        self._signature = signature
        self._response_sink = response_sink
        self.make_unavailable: Callable[[], RequestError] | None = None
        self._waiting: list[MetadataRequest] = []

    def reconfigure(self, config: ModelConfig) -> None:
        """From now on the replies say what follows from this configuration."""
        self._config = config

    def request(self, request: MetadataRequest) -> None:
        """Reply to a client, or have it wait.

        Raises:
            RequestError: nobody will answer, or too many wait and most of them are this one's.
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
                f"{max_requests} metadata requests are waiting already, most of them of this client's user"
            )
            if last == request:
                raise error
            self._response_sink.reply_error(last.client, last.request_id, error)
        self.reply_all()

    def reply_all(self) -> None:
        """Reply to all that wait, if the signature is known."""
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
        """Refuse each client that waits and is `should_reject`."""
        for request in self._take(should_reject):
            self._response_sink.reply_error(request.client, request.request_id, error)

    def forget(self, client: bytes) -> None:
        """The client is gone."""
        if self._waiting:
            self._take(lambda each: each == client)

    def adopt(self, old: MetadataReplies) -> None:
        """Take over the clients that wait there."""
        self._waiting += old._take(lambda _: True)
        self.reply_all()

    def _take(self, matches: Callable[[bytes], bool]) -> list[MetadataRequest]:
        taken = [request for request in self._waiting if matches(request.client)]
        self._waiting = [request for request in self._waiting if not matches(request.client)]
        return taken


def example_shapes(built: Built) -> tuple[tuple[int, ...], ...] | None:
    """Return a shape for each input that the model runs on, where requests choose any; None if none is known."""
    has_free_dims = any(each.shape is None or -1 in each.shape for each in built.inputs)
    case_shapes = built.selftest_cases[0] if built.selftest_cases else {}
    shapes = tuple(case_shapes[each.name] for each in built.inputs if each.name in case_shapes)
    is_known = len(shapes) == len(built.inputs) and sum(map(len, shapes)) <= _MAX_DIMS
    return shapes if has_free_dims and is_known else None


def _are_answers_exact(config: ModelConfig, built: Built) -> bool | None:
    """Return whether answers are known to be those of each request alone; None where each runs alone."""
    row_support, batching, split = built.row_support, config.batching, config.split
    if row_support is None or not row_support.inputs or not row_support.outputs:
        return None
    can_differ = (batching.max_rows > 1 and not batching.exact) or (split.part_rows > 0 and not split.exact)
    return row_support.is_equal if row_support.is_equal or can_differ else None


def check_inputs(signature: Mapping[str, TensorSignature], inputs: Sequence[TensorSpec]) -> None:
    """Check names, datatypes, ranks and dimensions against the model's inputs, by name.

    Raises:
        InvalidArgument: the text names the input, what was expected and what came.
    """
    if len(inputs) != len(signature) or {each.name for each in inputs} != set(signature):
        _raise_wrong_names(signature, inputs)
    for tensor in inputs:
        expected = signature[tensor.name]
        if tensor.datatype != expected.datatype:
            raise InvalidArgument(f"input {tensor.name}: expected {expected.datatype}, got {tensor.datatype}")
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
    """Check the names of the outputs that are wanted.

    Raises:
        InvalidArgument: the text names the output.
    """
    expected = f"expected some of {', '.join(outputs) or 'none'}"
    if not wanted:
        raise InvalidArgument(f"outputs: none is named; {expected}, or no such field for all")
    for name in wanted:
        if name not in outputs:
            raise InvalidArgument(f"outputs: {name} is not an output of the model; {expected}")
    if len({*wanted}) < len(wanted):
        raise InvalidArgument(f"outputs: one is named twice in {', '.join(wanted)}")


def check_rows(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check how many rows a request has.

    Args:
        built: what the holder has told.
        limits: of the model.
        inputs: that `check_inputs` has let pass.

    Raises:
        InvalidArgument: the text names the input, what was expected and what came.
    """
    counted = built.row_support.inputs if limits.max_rows and built.row_support is not None else ()
    for tensor in inputs:
        if tensor.name in counted and tensor.shape[0] > limits.max_rows:
            expected = (
                f"expected at most {limits.max_rows} rows ({limits.limit_name} of the model), got {tensor.shape[0]}"
            )
            raise InvalidArgument(f"input {tensor.name}: {expected}")


def check_gears(built: Built, limits: RowLimits, inputs: Sequence[TensorSpec]) -> None:
    """Check the sizes of the free dimensions against those that the model was converted for, if these are known.

    Args:
        built: what the holder has told.
        limits: of the model: rows are padded where it has sizes.
        inputs: that `check_rows` has let pass.

    Raises:
        InvalidArgument: the text names the dimensions, the sizes that are taken and what came.
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
    """Whether one of the two shapes is a scalar's, and the other one has exactly one element, too.

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
    """Return how the signature of `new` differs from that of `old`, so that a client would notice, or ""."""
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
