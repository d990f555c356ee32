"""How an error ends a call."""

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
def test_its_code_is_that_of_grpc(code: str) -> None:
    assert rpc_status(ERRORS[code]("why")) == (STATUSES[code].grpc, "why", ())


def test_what_is_too_large_is_out_of_resources() -> None:
    assert rpc_status(TooLarge("why")).code == 8


def test_it_says_when_to_ask_again() -> None:
    metadata = dict(rpc_status(ResourceExhausted("later", retry_after=2.5)).metadata)
    assert metadata["grpc-retry-pushback-ms"] == "2500"
    status = STATUS["Status"].FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (8, "later")
    assert status.details[0].type_url.endswith("/google.rpc.RetryInfo")
    delay = STATUS["RetryInfo"].FromString(status.details[0].value).retry_delay
    assert (delay.seconds, delay.nanos) == (2, 500_000_000)


@given(st.builds(operator.mul, st.characters(), st.integers(0, 5000)), st.floats(0, 1e9))
def test_no_text_is_too_long_for_the_headers_of_a_client(text: str, after: float) -> None:
    _, told, metadata = rpc_status(ResourceExhausted(text, retry_after=after))
    assert text.startswith(told)
    headers = [3 * len(told.encode()), *(len(value) * 4 // 3 + len(key) for key, value in metadata)]
    assert sum(headers) < 8 * 1024
