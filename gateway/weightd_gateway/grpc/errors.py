"""How an error ends a call: its code, its text, and what a client's library reads of it."""

from __future__ import annotations

from typing import NamedTuple

from weightd_gateway.error_codes import status_of
from weightd_gateway.grpc.messages import STATUS
from weightd_protocol.errors import RequestError

# Text and details go as headers, of which a client refuses more than 8 KiB at random and more than 16 KiB always. A
# byte may take three in the one, and four thirds in the other.
MAX_TEXT_BYTES = 1500

_RETRY_INFO_TYPE = "type.googleapis.com/google.rpc.RetryInfo"


class RpcStatus(NamedTuple):
    """How a call ends.

    Attributes:
        code: the number of gRPC's status.
        text: for people.
        metadata: what goes with it.
    """

    code: int
    text: str
    metadata: tuple[tuple[str, str | bytes], ...]


def rpc_status(error: RequestError) -> RpcStatus:
    """Return how a call ends in this error.

    Where it helps to wait, two say so: `grpc-retry-pushback-ms`, which gRPC's own retries obey, and a
    google.rpc.RetryInfo in `grpc-status-details-bin`, which people's code reads.
    """
    code = status_of(error).grpc
    text = str(error).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
    if error.retry_after is None:
        return RpcStatus(code, text, ())
    milliseconds = max(1, round(error.retry_after * 1000))
    seconds, rest = divmod(milliseconds, 1000)
    delay = STATUS["Duration"](seconds=seconds, nanos=rest * 1_000_000)
    retry = STATUS["Any"](type_url=_RETRY_INFO_TYPE, value=STATUS["RetryInfo"](retry_delay=delay).SerializeToString())
    details = STATUS["Status"](code=code, message=text, details=[retry]).SerializeToString()
    return RpcStatus(code, text, (("grpc-retry-pushback-ms", str(milliseconds)), ("grpc-status-details-bin", details)))
