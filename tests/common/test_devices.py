from __future__ import annotations

import pytest

from weightd_common import devices


@pytest.mark.parametrize(
    ("text", "shortest"), [("0", "0"), ("3,0-1,2", "0-3"), ("8,0-1,3,5-6", "0-1,3,5-6,8"), ("7-7,9,8", "7-9")]
)
def test_parses_and_formats_core_lists(text: str, shortest: str) -> None:
    assert devices.format_cpulist(devices.parse_cpulist(text)) == shortest
    assert devices.parse_cpulist(shortest) == devices.parse_cpulist(text)
