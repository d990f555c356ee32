"""Half a minute of faults, and some more of them under a service manager; `make chaos` is for more."""

from __future__ import annotations

import pytest

from .kinds import ALL, Fault, lacking
from .material import NoEngineError
from .run import Run

SEED = 20_260_101


# The first has each fault that a minute has.
@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seconds", "managed"), [(25.0, False), (15.0, True)], ids=["alone", "managed"])
def test_every_request_ends_in_one_right_answer_or_one_clear_error(seconds: float, managed: bool) -> None:
    try:
        report = Run(SEED, seconds, ALL - lacking().keys(), managed).run()
    except NoEngineError as error:
        pytest.fail(str(error))
    print(report.text())
    assert not report.problems, report.text()
    assert any(each.fault is Fault.KILL_DAEMON for each in report.strikes)
