"""Ask a weightd daemon for inference.

::

    from weightd.client import Client

    with Client() as client:
        outputs = client.infer("digits", {"image": images})

The library for other people's programs, and nothing else: it imports `weightd.shared` and `weightd.protocol`, numpy,
pyzmq and msgpack, and runs on Python 3.7. What is not exported here is not for them.
"""

from __future__ import annotations

from weightd.client.client import Client, Pending
from weightd.client.session import ClientClosed, WrongProcess
from weightd.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolError,
    RequestError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    WeightdError,
)

__all__ = [
    "Cancelled",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "Pending",
    "PermissionDenied",
    "ProtocolError",
    "RequestError",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "WeightdError",
    "WrongProcess",
]
