from __future__ import annotations

import asyncio
import logging

import pytest

from weightd_gateway.grpc.handlers import Context, report_errors
from weightd_gateway.logs import log_failure

LOG = logging.getLogger("weightd.gateway.test")


class UnforeseenError(Exception):
    """An error of a class that no other test raises."""


class NewError(Exception):
    """Like `UnforeseenError`, for the other test."""


class AbortError(Exception):
    """The error that gRPC raises when a call is aborted."""


class Call:
    """The part of gRPC's context that ends a call with an error."""

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, *_: object) -> None:
        raise AbortError


def test_logs_repeated_error_once(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        log_failure(LOG, f"HTTP request failed: GET /{number}", UnforeseenError(number))
    # A logging interval may end during the loop.
    assert 1 <= len(caplog.records) <= 2
    assert caplog.records[0].exc_info is not None


def test_logs_repeated_call_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    @report_errors
    async def handle(messages: object, context: Context) -> None:
        raise NewError

    for _ in range(20):
        with pytest.raises(AbortError):
            asyncio.run(handle((), Call()))  # type: ignore[arg-type]
    assert 1 <= sum("gRPC call failed" in each.getMessage() for each in caplog.records) <= 2
