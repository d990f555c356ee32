"""How much is under way at once, in all protocols together: nothing waits here, beyond it callers are told so."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_gateway.fair_limit import FairLimit
from weightd_protocol.errors import ResourceExhausted

# A guess: by then some of what is under way has been answered.
_RETRY_S = 1.0


class AdmissionControl:
    """Requests that are received or answered.

    Args:
        max_requests: of them; how many each caller may have of that is for `FairLimit` to say, as of the bytes.
        max_bytes: of all of them.

    Attributes:
        max_requests: as above.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._request_limit = FairLimit(max_requests)
        self._byte_limit = FairLimit(max_bytes)

    @property
    def in_flight(self) -> int:
        """How many there are."""
        return self._request_limit.in_use

    @property
    def reserved_bytes(self) -> int:
        """How many bytes are kept of all of them."""
        return self._byte_limit.in_use

    @contextlib.contextmanager
    def admit(self, caller: Caller | None) -> Generator[Permit, None, None]:
        """Have a request under way within the block; None: of whoever asks.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if not self._request_limit.take(caller):
            raise _exhausted(f"its share of {self.max_requests} requests", "max_in_flight")
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        try:
            yield permit
        finally:
            self._request_limit.release(caller)
            permit.release()

    def reserve_response(self, caller: Caller | None, nbytes: int) -> Permit:
        """Return a permit of an answer with so many bytes, which outlasts that of its request: until `Permit.release`.

        Raises:
            TooLarge: there will never be room for them.
            ResourceExhausted: there is none now.
        """
        permit = Permit(self._byte_limit, self._max_bytes, caller)
        permit.reserve(nbytes)
        return permit


class Permit:
    """A request that is under way.

    Args:
        byte_limit: of bytes.
        max_bytes: bytes.
        caller: whose request it is.
    """

    def __init__(self, byte_limit: FairLimit, max_bytes: int, caller: Caller | None) -> None:
        self._byte_limit = byte_limit
        self._max_bytes = max_bytes
        self._caller = caller
        self._nbytes = 0

    def reserve(self, nbytes: int) -> None:
        """Keep so many more bytes of the request, until its end.

        Raises:
            TooLarge: there will never be room for so many.
            ResourceExhausted: there is none now.
        """
        if self._nbytes + nbytes > self._max_bytes:
            raise TooLarge(f"expected at most {self._max_bytes} bytes of a request or an answer (max_memory_bytes)")
        if not self._byte_limit.take(self._caller, nbytes, self._nbytes):
            raise _exhausted(f"its share of {self._max_bytes} bytes of requests", "max_memory_bytes")
        self._nbytes += nbytes

    def release(self) -> None:
        """Nothing is kept of it any more."""
        self._byte_limit.release(self._caller, self._nbytes)
        self._nbytes = 0


def _exhausted(what: str, key: str) -> ResourceExhausted:
    return ResourceExhausted(f"the caller has {what} under way at this gateway ({key})", retry_after=_RETRY_S)
