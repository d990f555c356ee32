"""What is a trace's context, and what is none."""

from __future__ import annotations

import pytest

from weightd_gateway.tracing import valid_traceparent

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_is_passed_on_as_it_is() -> None:
    assert valid_traceparent(GOOD) == GOOD


@pytest.mark.parametrize(
    "given", ["", GOOD.upper(), f"ff{GOOD[2:]}", GOOD.replace("b7ad6b7169203331", "0" * 16), f"{GOOD}\n", f"{GOOD}-x"]
)
def test_what_is_none_is_passed_over(given: str) -> None:
    assert valid_traceparent(given) == ""
