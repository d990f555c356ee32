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
    """As `UnforeseenError`, for the other test."""


class AbortError(Exception):
    """What gRPC raises where a call is aborted."""


class Call:
    """As much of gRPC's context as is needed to end a call in an error."""

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, *_: object) -> None:
        raise AbortError


def test_an_error_that_a_caller_causes_again_and_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        log_failure(LOG, f"HTTP request failed: GET /{number}", UnforeseenError(number))
    # A period may end meanwhile.
    assert 1 <= len(caplog.records) <= 2
    assert caplog.records[0].exc_info is not None


def test_calls_that_fail_again_and_again_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    @report_errors
    async def handle(messages: object, context: Context) -> None:
        raise NewError

    for _ in range(20):
        with pytest.raises(AbortError):
            asyncio.run(handle((), Call()))  # type: ignore[arg-type]
    assert 1 <= sum("gRPC call failed" in each.getMessage() for each in caplog.records) <= 2
