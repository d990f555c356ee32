"""Python client for weightd, a daemon for model inference.

::

    from weightd import Client

    with Client() as client:
        outputs = client.infer("digits", {"image": images})

`AsyncClient` has the same methods for asyncio. The public API consists of the names in `__all__`; everything else is
internal. The package needs Python 3.7 or later and depends only on `weightd_common`, `weightd_protocol`, numpy, pyzmq
and msgpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightd.client import Client
from weightd.model import AsyncModel, Model, PendingOutput
from weightd.pending import NotCopyable, Pending
from weightd.retry import Retry
from weightd.session import ClientClosed, WrongProcess
from weightd_protocol.errors import (
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
from weightd_protocol.version import VERSION

if TYPE_CHECKING:
    from weightd.aio import AsyncClient
    from weightd.aio_transport import WrongLoop

__all__ = [
    "AsyncClient",
    "AsyncModel",
    "Cancelled",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Model",
    "NotCopyable",
    "NotFound",
    "Pending",
    "PendingOutput",
    "PermissionDenied",
    "ProtocolError",
    "RequestError",
    "ResourceExhausted",
    "Retry",
    "Unauthenticated",
    "Unavailable",
    "WeightdError",
    "WrongLoop",
    "WrongProcess",
    "__version__",
]

__version__ = VERSION


def __getattr__(name: str) -> Any:
    """Import the asyncio client on the first access to it, because importing asyncio takes time and memory."""
    if name in ("AsyncClient", "WrongLoop"):
        from weightd import aio, aio_transport  # noqa: PLC0415

        return getattr(aio if name == "AsyncClient" else aio_transport, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
