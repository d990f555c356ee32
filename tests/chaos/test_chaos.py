"""A minute of faults, and some more of them under a service manager."""

from __future__ import annotations

import pytest

from .kinds import ALL, Fault, lacking
from .material import NoEngineError
from .run import Run

SEED = 20_260_101
SECONDS = 60.0
SECONDS_MANAGED = 20.0


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_every_request_ends_in_one_right_answer_or_one_clear_error() -> None:
    try:
        report = Run(SEED, SECONDS, ALL - lacking().keys()).run()
    except NoEngineError as error:
        pytest.fail(str(error))
    print(report.text())
    assert not report.problems, report.text()


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_so_it_does_where_the_next_daemon_goes_on_with_the_processes() -> None:
    try:
        report = Run(SEED, SECONDS_MANAGED, ALL - lacking().keys(), managed=True).run()
    except NoEngineError as error:
        pytest.fail(str(error))
    print(report.text())
    assert not report.problems, report.text()
    assert any(each.fault is Fault.KILL_DAEMON for each in report.strikes)
