from __future__ import annotations

from typing import Optional

import pytest

from weightd_common.log_text import plural, progress_text


@pytest.mark.parametrize(
    ("done", "left_s", "text"),
    [
        (0.437, 21.0, "43 %, about 20 s left"),
        (0.0, 0.2, "0 %, about 1 s left"),
        (0.5, 119.0, "50 %, about 120 s left"),
        (0.5, 200.0, "50 %, about 3 min left"),
        (0.5, 9000.0, "50 %, about 2 h left"),
        (1.0, None, "99 %"),
        (None, None, ""),
    ],
)
def test_progress_text(done: Optional[float], left_s: Optional[float], text: str) -> None:
    assert progress_text(done, left_s) == text


def test_plurals() -> None:
    assert [plural(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [plural(number, "process") for number in (1, 2)] == ["1 process", "2 processes"]
