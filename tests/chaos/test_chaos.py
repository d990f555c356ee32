"""A minute of faults."""

from __future__ import annotations

import pytest

from .kinds import ALL, lacking
from .material import NoEngineError
from .run import Run

SEED = 20_260_101
SECONDS = 60.0


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_every_request_ends_in_one_right_answer_or_one_clear_error() -> None:
    try:
        report = Run(SEED, SECONDS, ALL - lacking().keys()).run()
    except NoEngineError as error:
        pytest.fail(str(error))
    print(report.text())
    assert not report.problems, report.text()
