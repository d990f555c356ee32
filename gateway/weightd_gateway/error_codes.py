"""Status codes of errors in HTTP and gRPC: one table for both protocols."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from weightd import ClientClosed
from weightd_protocol.errors import Internal, RequestError, ResourceExhausted, Unavailable, WeightdError


class TooLarge(ResourceExhausted):
    """A request, or the response to it, exceeds a size limit of this gateway."""


class ErrorStatus(NamedTuple):
    """The status codes of an error.

    Attributes:
        http: the status of the HTTP response.
        grpc: the number of the gRPC status.
    """

    http: int
    grpc: int


# The status codes by `RequestError.code`, which is the name of the gRPC status.
STATUSES: Mapping[str, ErrorStatus] = {
    "CANCELLED": ErrorStatus(499, 1),
    "INVALID_ARGUMENT": ErrorStatus(400, 3),
    "DEADLINE_EXCEEDED": ErrorStatus(504, 4),
    "NOT_FOUND": ErrorStatus(404, 5),
    "PERMISSION_DENIED": ErrorStatus(403, 7),
    "RESOURCE_EXHAUSTED": ErrorStatus(429, 8),
    # 503, although gRPC's own mapping to HTTP is 400: the operator must fix the model; the request of the caller is
    # valid.
    "FAILED_PRECONDITION": ErrorStatus(503, 9),
    "INTERNAL": ErrorStatus(500, 13),
    "UNAVAILABLE": ErrorStatus(503, 14),
    "UNAUTHENTICATED": ErrorStatus(401, 16),
}

_TOO_LARGE = ErrorStatus(413, STATUSES[TooLarge.code].grpc)


def status_of(error: RequestError) -> ErrorStatus:
    """Return the status codes of an error."""
    return _TOO_LARGE if isinstance(error, TooLarge) else STATUSES[error.code]


def retry_after(error: RequestError) -> int | None:
    """Return the whole seconds after which a retry may succeed; None if unknown."""
    return None if error.retry_after is None else math.ceil(error.retry_after)


def to_request_error(error: WeightdError) -> RequestError:
    """Return the error to report to a caller; errors of the client library become `Unavailable` or `Internal`."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ClientClosed):
        return Unavailable("the gateway is stopping")
    return Internal(str(error))
