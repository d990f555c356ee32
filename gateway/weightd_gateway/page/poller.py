"""Polls the daemon for the status page, but only while a browser has the page open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol

from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_gateway.auth import Caller
from weightd_gateway.page.api import status_json
from weightd_protocol.errors import DeadlineExceeded, Unavailable
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.status import StatusResponse

# Maximum seconds between two polls whose difference gives the rates on the page. An open page polls each second. A
# longer gap shows that no browser had the page open; the rates are then computed anew from later polls.
_MAX_GAP_S = 10.0


class StatusSource(Protocol):
    """The part of the daemon client's interface that the poller uses."""

    def metrics(self, caller: Caller) -> Awaitable[MetricsResponse]:
        """Return the daemon's metrics."""
        ...

    def status(self, caller: Caller) -> Awaitable[StatusResponse]:
        """Return the daemon's status."""
        ...


class StatusPoller:
    """Provides the data of the status page. All viewers of a tenant get the same overview of models and processes.

    Args:
        daemon: the source of metrics and status.
    """

    def __init__(self, daemon: StatusSource) -> None:
        self._daemon = daemon
        self._by_tenant: dict[str | None, _TenantOverview] = {}

    async def status_json(self, caller: Caller) -> bytes:
        """Return the content of status.json for a caller.

        Raises:
            RequestError: the caller has no access. A daemon that cannot be reached is reported in the content instead.
        """
        if caller.tenant not in self._by_tenant:
            self._by_tenant[caller.tenant] = _TenantOverview()
        return await self._by_tenant[caller.tenant].status_json(self._daemon, caller)


class _TenantOverview:
    """The latest overview (state of models and processes) for the viewers of one tenant."""

    def __init__(self) -> None:
        self._history = History(_MAX_GAP_S)
        self._overview: Overview | None = None
        self._polled_at = time.monotonic()
        self._lock = asyncio.Lock()

    async def status_json(self, daemon: StatusSource, caller: Caller) -> bytes:
        async with self._lock:
            try:
                await self._poll(daemon, caller)
            except (Unavailable, DeadlineExceeded) as error:
                return status_json(self._overview, time.monotonic() - self._polled_at, _ERROR_TEXTS[error.code])
            return status_json(self._overview)

    async def _poll(self, daemon: StatusSource, caller: Caller) -> None:
        self._history.on_metrics(await daemon.metrics(caller))
        if self._history.should_request_status(time.monotonic()):
            self._history.on_status(await daemon.status(caller))
        self._overview, self._polled_at = self._history.overview(), time.monotonic()


# Texts for the page by error code. The error's own text is not shown, because it may contain paths of this host.
_ERROR_TEXTS = {
    Unavailable.code: "The daemon cannot be reached. It has stopped or is restarting.",
    DeadlineExceeded.code: "The daemon does not respond.",
}
