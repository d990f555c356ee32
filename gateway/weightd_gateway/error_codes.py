"""How an error is told in HTTP and in gRPC: one table for both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from weightd import ClientClosed
from weightd_protocol.errors import Internal, RequestError, ResourceExhausted, Unavailable, WeightdError


class TooLarge(ResourceExhausted):
    """What was sent, or would come of it, is longer than this gateway takes."""


class ErrorStatus(NamedTuple):
    """What an error is.

    Attributes:
        http: the status of the response.
        grpc: the number of the status of the call.
    """

    http: int
    grpc: int


# By the code of the error, which is gRPC's name for it.
STATUSES: Mapping[str, ErrorStatus] = {
    "CANCELLED": ErrorStatus(499, 1),
    "INVALID_ARGUMENT": ErrorStatus(400, 3),
    "DEADLINE_EXCEEDED": ErrorStatus(504, 4),
    "NOT_FOUND": ErrorStatus(404, 5),
    "PERMISSION_DENIED": ErrorStatus(403, 7),
    "RESOURCE_EXHAUSTED": ErrorStatus(429, 8),
    # Not the 400 that gRPC's own table has: it is the model that is to be mended, not the request.
    "FAILED_PRECONDITION": ErrorStatus(503, 9),
    "INTERNAL": ErrorStatus(500, 13),
    "UNAVAILABLE": ErrorStatus(503, 14),
    "UNAUTHENTICATED": ErrorStatus(401, 16),
}

_TOO_LARGE = ErrorStatus(413, STATUSES[TooLarge.code].grpc)


def status_of(error: RequestError) -> ErrorStatus:
    """Return how an error is told."""
    return _TOO_LARGE if isinstance(error, TooLarge) else STATUSES[error.code]


def retry_after(error: RequestError) -> int | None:
    """Return the whole seconds after which the same request may succeed; None where nothing is known of that."""
    return None if error.retry_after is None else math.ceil(error.retry_after)


def to_request_error(error: WeightdError) -> RequestError:
    """Return the error that a caller is told: of what the client says to this process, the code that it means."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientClosed):
        return Unavailable("the gateway stops")
    return Internal(str(error))
