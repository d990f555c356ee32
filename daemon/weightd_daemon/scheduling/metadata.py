"""What a model takes and gives, as far as it is known, and who waits to be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.validation import (
    RowLimits,
    check_gears,
    check_inputs,
    check_outputs,
    check_rows,
    describe_difference,
    with_declared_shapes,
)
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, TensorSignature
from weightd_protocol.messages.worker import Built

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
    """

    def __init__(self, row_limits: RowLimits = NO_ROW_LIMITS) -> None:
        self._row_limits = row_limits
        self.built: Built | None = None
        self._inputs: dict[str, TensorSignature] = {}
        self._outputs: Sequence[str] = ()
        # The descriptions that were checked, by their identity. Each is kept, so that no other object takes its
        # identity, with the one that `check` returns for it.
        self._checked: dict[int, tuple[RequestDescription, RequestDescription]] = {}
        self._metadata_requests: list[MetadataRequest] = []

    def set_row_limits(self, row_limits: RowLimits) -> None:
        """So many rows a request may have from now on."""
        self._row_limits = row_limits
        self._checked.clear()

    def on_built(self, built: Built) -> None:
        """A holder has built the model."""
        self.built = built
        self._inputs = {each.name: each for each in built.inputs}
        self._outputs = [each.name for each in built.outputs]
        self._checked.clear()

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
        # The decoder returns the same object for equal bytes, so most requests were checked before.
        cached = self._checked.get(id(description))
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
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[id(description)] = description, declared
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

    def add_request(self, request: MetadataRequest, max_requests: int) -> MetadataRequest | None:
        """Somebody wants to be told; return who is not any more, where too many wait: the last one of who asks most."""
        self._metadata_requests.append(request)
        if len(self._metadata_requests) <= max_requests:
            return None
        counts = Counter(each.user for each in self._metadata_requests)
        last = max(reversed(self._metadata_requests), key=lambda each: counts[each.user])
        self._metadata_requests.remove(last)
        return last

    def adopt_requests(self, old: Signature) -> None:
        """Take over who waits there."""
        self._metadata_requests += old.take_requests()

    def take_requests(self, matches: Callable[[MetadataRequest], bool] = lambda _: True) -> list[MetadataRequest]:
        """Return those who wait and are chosen, and forget them."""
        if not self._metadata_requests:
            return []
        taken = [request for request in self._metadata_requests if matches(request)]
        self._metadata_requests = [request for request in self._metadata_requests if not matches(request)]
        return taken


def example_shapes(built: Built) -> tuple[tuple[int, ...], ...] | None:
    """Return a shape for each input that the model runs on, where requests choose any; None if none is known."""
    has_free_dims = any(each.shape is None or -1 in each.shape for each in built.inputs)
    case_shapes = built.selftest_cases[0] if built.selftest_cases else {}
    shapes = tuple(case_shapes[each.name] for each in built.inputs if each.name in case_shapes)
    is_known = len(shapes) == len(built.inputs) and sum(map(len, shapes)) <= _MAX_DIMS
    return shapes if has_free_dims and is_known else None
