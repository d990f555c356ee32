"""Exceptions of weightd, and the error codes of the protocol.

::

    WeightdError
    ├── ProtocolError              data that violates the protocol
    │   ├── LocalProtocolError     this side was about to send the data
    │   └── RemoteProtocolError    the peer sent the data
    └── RequestError               a request failed; one subclass for each code
        ├── InvalidArgument        INVALID_ARGUMENT     the request is invalid and can never succeed
        ├── NotFound               NOT_FOUND            the model does not exist
        ├── DeadlineExceeded       DEADLINE_EXCEEDED    no response within the timeout of the request
        ├── ResourceExhausted      RESOURCE_EXHAUSTED   a limit is reached; try again later
        ├── Unavailable            UNAVAILABLE          the service is unavailable; try again later
        ├── FailedPrecondition     FAILED_PRECONDITION  the service is unavailable until the operator changes something
        ├── PermissionDenied       PERMISSION_DENIED    the client has no permission
        ├── Unauthenticated        UNAUTHENTICATED      the client is unknown
        ├── Cancelled              CANCELLED            the client cancelled the request
        └── Internal               INTERNAL             the engine or weightd failed

weightd uses the error codes of gRPC (https://grpc.io/docs/guides/status-codes/), so a gateway can return them
unchanged.
"""

from __future__ import annotations

from typing import ClassVar, Dict, Optional, Type


class WeightdError(Exception):
    """Base class of all exceptions that weightd raises deliberately."""


class ProtocolError(WeightdError):
    """Data violates the protocol. The text names the field."""


class LocalProtocolError(ProtocolError):
    """This side was about to send data that violates the protocol."""


class RemoteProtocolError(ProtocolError):
    """The peer sent data that violates the protocol.

    Attributes:
        request_id: the id of the request that the data belonged to; "" if the data had no readable id.
    """

    def __init__(self, text: str, request_id: str = "") -> None:
        super().__init__(text)
        self.request_id = request_id


class RequestError(WeightdError):
    """A request failed. Each error code of the protocol has a subclass.

    Attributes:
        code: the name of the error code in gRPC, such as "NOT_FOUND".
        retry_after: seconds after which the same request may succeed; None if the daemon does not know this.
    """

    code: ClassVar[str] = ""

    def __init__(self, text: str = "", *, retry_after: Optional[float] = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class InvalidArgument(RequestError):
    """The request is invalid and can never succeed unchanged."""

    code = "INVALID_ARGUMENT"


class NotFound(RequestError):
    """The model does not exist."""

    code = "NOT_FOUND"


class DeadlineExceeded(RequestError):
    """No response arrived within the timeout of the request."""

    code = "DEADLINE_EXCEEDED"


class ResourceExhausted(RequestError):
    """A limit of the daemon is reached. The same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(RequestError):
    """The daemon or the model is unavailable at present. The same request may succeed later."""

    code = "UNAVAILABLE"


class FailedPrecondition(RequestError):
    """The model is unavailable, and waiting does not help. The error text says what an operator must change first."""

    code = "FAILED_PRECONDITION"


class PermissionDenied(RequestError):
    """The client has no permission for this operation."""

    code = "PERMISSION_DENIED"


class Unauthenticated(RequestError):
    """The daemon does not know the client."""

    code = "UNAUTHENTICATED"


class Cancelled(RequestError):
    """The client cancelled the request."""

    code = "CANCELLED"


class Internal(RequestError):
    """The engine or weightd itself failed."""

    code = "INTERNAL"


ERRORS: Dict[str, Type[RequestError]] = {
    error.code: error
    for error in (
        InvalidArgument,
        NotFound,
        DeadlineExceeded,
        ResourceExhausted,
        Unavailable,
        FailedPrecondition,
        PermissionDenied,
        Unauthenticated,
        Cancelled,
        Internal,
    )
}


def request_error(code: str, text: str, *, retry_after: Optional[float] = None) -> RequestError:
    """Return an exception of the subclass of `RequestError` for an error code.

    Raises:
        KeyError: `code` is not in `ERRORS`.
    """
    return ERRORS[code](text, retry_after=retry_after)
