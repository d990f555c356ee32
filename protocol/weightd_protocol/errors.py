"""The errors of weightd and their codes.

::

    WeightdError
    ├── ProtocolError              bytes that break the protocol
    │   ├── LocalProtocolError     this side was about to send them
    │   └── RemoteProtocolError    the peer sent them
    └── RequestError               a request ended in an error; one subclass for each code
        ├── InvalidArgument        INVALID_ARGUMENT     the request can never succeed as it is
        ├── NotFound               NOT_FOUND            no such model
        ├── DeadlineExceeded       DEADLINE_EXCEEDED    no answer within the request's timeout
        ├── ResourceExhausted      RESOURCE_EXHAUSTED   a bound is reached; try again later
        ├── Unavailable            UNAVAILABLE          nobody can answer now; try again later
        ├── FailedPrecondition     FAILED_PRECONDITION  nobody will answer until something is changed
        ├── PermissionDenied       PERMISSION_DENIED    the caller may not
        ├── Unauthenticated        UNAUTHENTICATED      the caller is not known
        ├── Cancelled              CANCELLED            the caller took it back
        └── Internal               INTERNAL             the engine or weightd failed

The code names are gRPC's (https://grpc.io/docs/guides/status-codes/), so that a gateway loses nothing.
"""

from __future__ import annotations

from typing import ClassVar, Dict, Optional, Type


class WeightdError(Exception):
    """Base of every error that weightd raises on purpose."""


class ProtocolError(WeightdError):
    """Bytes break the protocol; the text names the field."""


class LocalProtocolError(ProtocolError):
    """This side was about to send something that the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol forbids.

    Attributes:
        request_id: the id of the offending request where it could be read, else "".
    """

    def __init__(self, text: str, request_id: str = "") -> None:
        super().__init__(text)
        self.request_id = request_id


class RequestError(WeightdError):
    """A request ended in an error.

    Attributes:
        code: the gRPC name of the error's kind.
        retry_after: seconds after which the same request may succeed; None where nothing is known of that.
    """

    code: ClassVar[str] = ""

    def __init__(self, text: str = "", *, retry_after: Optional[float] = None) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class InvalidArgument(RequestError):
    """The request can never succeed as it is."""

    code = "INVALID_ARGUMENT"


class NotFound(RequestError):
    """There is no model of that name."""

    code = "NOT_FOUND"


class DeadlineExceeded(RequestError):
    """No answer came within the request's timeout."""

    code = "DEADLINE_EXCEEDED"


class ResourceExhausted(RequestError):
    """A bound of the daemon is reached; the same request may succeed later."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(RequestError):
    """Nobody can answer now; the same request may succeed later."""

    code = "UNAVAILABLE"


class FailedPrecondition(RequestError):
    """Nobody can answer, and waiting does not help: something has to be changed first, the text says what."""

    code = "FAILED_PRECONDITION"


class PermissionDenied(RequestError):
    """The caller may not do this."""

    code = "PERMISSION_DENIED"


class Unauthenticated(RequestError):
    """The caller is not known to the daemon."""

    code = "UNAUTHENTICATED"


class Cancelled(RequestError):
    """The caller took the request back."""

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
    """Return the exception for a code of the wire.

    Raises:
        KeyError: `code` is none of the codes in `ERRORS`.
    """
    return ERRORS[code](text, retry_after=retry_after)
