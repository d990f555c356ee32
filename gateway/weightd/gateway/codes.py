"""How an error is told in HTTP and in gRPC: one table for both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from weightd.client import ClientClosed
from weightd.protocol.errors import (
    Internal,
    RequestError,
    ResourceExhausted,
    Unavailable,
    WeightdError,
)


class TooLarge(ResourceExhausted):
    """What was sent, or would come of it, is longer than this gateway takes."""


class Status(NamedTuple):
    """What an error is.

    Attributes:
        http: the status of the response.
        grpc: the number of the status of the call.
    """

    http: int
    grpc: int


# By the code of the error, which is gRPC's name for it.
STATUSES: Mapping[str, Status] = {
    "CANCELLED": Status(499, 1),
    "INVALID_ARGUMENT": Status(400, 3),
    "DEADLINE_EXCEEDED": Status(504, 4),
    "NOT_FOUND": Status(404, 5),
    "PERMISSION_DENIED": Status(403, 7),
    "RESOURCE_EXHAUSTED": Status(429, 8),
    # Not the 400 that gRPC's own table has: it is the model that is to be mended, not the request.
    "FAILED_PRECONDITION": Status(503, 9),
    "INTERNAL": Status(500, 13),
    "UNAVAILABLE": Status(503, 14),
    "UNAUTHENTICATED": Status(401, 16),
}

_TOO_LARGE = Status(413, STATUSES[TooLarge.code].grpc)


def status_of(error: RequestError) -> Status:
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
