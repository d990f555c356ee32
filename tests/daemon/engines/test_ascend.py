from __future__ import annotations

import pytest

from weightd_daemon.engines.ascend import physical_id


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [(0, "", 0), (3, " ", 3), (0, "4,5", 4), (1, "4, 5", 5), (2, "4,5", None), (0, "0-3", None), (0, "²", None)],
)
def test_the_number_of_a_device_that_is_not_the_first_to_be_seen(device: int, visible: str, number: int | None) -> None:
    assert physical_id(device, visible) == number
