"""What a tenant has of all that its table bounds, and whether it may have more."""

from __future__ import annotations

from weightd_common.tokenbuckets import TokenBucket
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.tenants.usage import QuotaExceeded
from weightd_protocol.messages.inference import RequestDescription

# A guess: how long it takes until some of what there is has been computed.
_RETRY_AFTER_S = 0.1


class Quota:
    """The counts of one tenant. They are kept where nothing is bounded, too: a reload may bound it.

    Attributes:
        in_flight: requests that were accepted and have not ended.
        waiting: those of them that no slot has been given yet.
        waiting_bytes: of their tensors.
        connections: that it has.
    """

    __slots__ = ("_messages", "connections", "in_flight", "waiting", "waiting_bytes")

    def __init__(self) -> None:
        self.in_flight = 0
        self.waiting = 0
        self.waiting_bytes = 0
        self.connections = 0
        self._messages = TokenBucket()

    def count_message(self, config: TenantConfig, now: float) -> None:
        """A message of any kind has come, or is sent on its account by another one.

        Raises:
            QuotaExceeded: there are too many.
        """
        rate = config.max_rate
        if not rate:
            return
        # Less than one a second are one now and then.
        burst = max(1.0, rate)
        if not self._messages.take(rate, burst, now):
            missing = 1.0 - self._messages.tokens(rate, burst, now)
            text = f"max_rate of this tenant is {rate:g} requests of any kind a second"
            raise QuotaExceeded("max_rate", text, retry_after=missing / rate)

    def check_request(self, config: TenantConfig, description: RequestDescription, nbytes: int) -> None:
        """See whether one more request may be accepted, whose tensors come with so many bytes.

        Its rows are the largest first dimension of its inputs.

        Raises:
            QuotaExceeded: it may not.
        """
        if config.max_rows:
            rows = max((each.shape[0] for each in description.inputs if each.shape), default=0)
            if rows > config.max_rows:
                text = f"max_rows of this tenant is {config.max_rows}, the first dimension of an input is {rows}"
                raise QuotaExceeded("max_rows", text)
        if config.max_in_flight and self.in_flight >= config.max_in_flight:
            raise _quota_error("max_in_flight", config.max_in_flight, self.in_flight)
        if config.max_queue and self.waiting >= config.max_queue:
            raise _quota_error("max_queue", config.max_queue, self.waiting)
        # One that is alone may be larger.
        if config.max_queue_bytes and self.waiting and self.waiting_bytes + nbytes > config.max_queue_bytes:
            raise _quota_error("max_queue_bytes", config.max_queue_bytes, self.waiting_bytes)

    def add_connection(self, config: TenantConfig) -> None:
        """One more connection has come, and counts from now on, whatever becomes of it.

        Raises:
            QuotaExceeded: it is to be hung up.
        """
        self.connections += 1
        if config.max_connections and self.connections > config.max_connections:
            text = f"max_connections of this tenant is {config.max_connections}: this connection ends"
            raise QuotaExceeded("max_connections", text, retry_after=_RETRY_AFTER_S)

    def add_request(self, nbytes: int) -> None:
        """A request waits from now on."""
        self.in_flight += 1
        self.waiting += 1
        self.waiting_bytes += nbytes

    def start_request(self, nbytes: int) -> None:
        """A slot is given it for the first time, or some of it."""
        self.waiting -= 1
        self.waiting_bytes -= nbytes

    def end_request(self, nbytes: int, *, has_started: bool) -> None:
        """It has ended; `has_started`: a slot had been given it."""
        self.in_flight -= 1
        if not has_started:
            self.start_request(nbytes)


def _quota_error(name: str, limit: int, current: int) -> QuotaExceeded:
    return QuotaExceeded(
        name, f"{name} of this tenant is {limit}, it has {current} already", retry_after=_RETRY_AFTER_S
    )
