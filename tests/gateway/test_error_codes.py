"""Tests of error codes: each code of the daemon has a status in HTTP and gRPC."""

from __future__ import annotations

import pytest

from weightd import ClientClosed
from weightd_gateway.error_codes import STATUSES, TooLarge, retry_after, status_of, to_request_error
from weightd_protocol.errors import (
    ERRORS,
    Internal,
    NotFound,
    RemoteProtocolError,
    ResourceExhausted,
    Unavailable,
    WeightdError,
)

# The numbers of google.rpc.Code.
_GRPC = {
    "CANCELLED": 1,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}


def test_each_code_has_a_status() -> None:
    assert {code: status.grpc for code, status in STATUSES.items()} == _GRPC
    assert {*STATUSES} == {*ERRORS}
    assert all(400 <= status.http < 600 for status in STATUSES.values())


def test_only_http_distinguishes_too_large() -> None:
    assert status_of(TooLarge("x")) == (413, 8)
    assert status_of(ResourceExhausted("x")) == (429, 8)
    assert status_of(NotFound("x")) == (404, 5)


def test_rounds_retry_time_up() -> None:
    assert retry_after(ResourceExhausted("x", retry_after=0.1)) == 1
    assert retry_after(ResourceExhausted("x", retry_after=2.0)) == 2
    assert retry_after(ResourceExhausted("x")) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RemoteProtocolError("nonsense"), Internal),
        (ClientClosed("closed"), Unavailable),
    ],
)
def test_client_errors_have_a_code(error: WeightdError, kind: type[WeightdError]) -> None:
    assert type(to_request_error(error)) is kind


def test_daemon_error_is_unchanged() -> None:
    error = NotFound("no model")
    assert to_request_error(error) is error
