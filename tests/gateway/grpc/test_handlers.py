"""Tests of how an error ends a gRPC call."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.error_codes import STATUSES, TooLarge
from weightd_gateway.grpc.handlers import rpc_status
from weightd_gateway.grpc.schema import STATUS
from weightd_protocol.errors import ERRORS, ResourceExhausted


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_maps_code_to_grpc_status(code: str) -> None:
    assert rpc_status(ERRORS[code]("why")) == (STATUSES[code].grpc, "why", ())


def test_too_large_is_resource_exhausted() -> None:
    assert rpc_status(TooLarge("why")).code == 8


def test_error_has_retry_pushback() -> None:
    metadata = dict(rpc_status(ResourceExhausted("later", retry_after=2.5)).metadata)
    assert metadata["grpc-retry-pushback-ms"] == "2500"
    status = STATUS["Status"].FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (8, "later")
    assert status.details[0].type_url.endswith("/google.rpc.RetryInfo")
    delay = STATUS["RetryInfo"].FromString(status.details[0].value).retry_delay
    assert (delay.seconds, delay.nanos) == (2, 500_000_000)


@given(st.builds(operator.mul, st.characters(), st.integers(0, 5000)), st.floats(0, 1e9))
def test_clips_text_to_fit_into_headers(text: str, after: float) -> None:
    _, message, metadata = rpc_status(ResourceExhausted(text, retry_after=after))
    assert text.startswith(message)
    headers = [3 * len(message.encode()), *(len(value) * 4 // 3 + len(key) for key, value in metadata)]
    assert sum(headers) < 8 * 1024
