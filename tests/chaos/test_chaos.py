"""A short run of all faults. `make chaos` runs longer, with MANAGED=1 under a service manager."""

from __future__ import annotations

import pytest

from .kinds import ALL, BEHAVIOUR, LACKING, Fault
from .material import NoEngineError
from .run import Run, patience
from .verdict import Strike

# With this seed, each fault strikes within the first seconds.
SEED, SECONDS = 20_264_039, 26.0
# The machine may be busy with other tests, so recovery may take longer than in `make chaos`.
BUSY_S = 60.0


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_short_run_with_all_faults() -> None:
    faults = ALL - LACKING.keys()
    try:
        report = Run(SEED, SECONDS, faults, recovery_s=BUSY_S).run()
    except NoEngineError as error:
        pytest.fail(str(error))
    print(report.text())
    assert not report.problems, report.text()
    assert any(each.fault is Fault.KILL_DAEMON for each in report.strikes)
    due = {each.fault for each in report.strikes} | {each.fault for each in report.skipped}
    assert due == faults - BEHAVIOUR


def test_recovery_limit_adds_detection_times() -> None:
    faults = (Fault.POISON, Fault.POISON, Fault.STOP_FORK_SERVER, Fault.KILL_WORKER)
    assert patience([Strike(fault, "m", 0.0) for fault in faults]) == 2 * 15.0 + 10.0
