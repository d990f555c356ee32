"""The number of workers follows the load, and no request is lost when it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.service import Service
from testkit.waiting import until

from .support import BareEngine, Load, SampleRequest, mlp_inputs, model_status, processes, ready_workers

pytestmark = pytest.mark.e2e

MIN, MAX = 1, 3


@pytest.fixture
def service(mlp: Path) -> Iterator[Service]:
    with Service({"mlp": {"path": mlp, "workers": {"min": MIN, "max": MAX, "idle": 1.0}}}) as service:
        service.ready()
        yield service


def test_workers_start_while_requests_wait_and_stop_when_idle(
    service: Service, mlp: Path, bare: BareEngine, questions: list[SampleRequest]
) -> None:
    slow = bare.questions(mlp, mlp_inputs((900, 800, 700)))
    assert len(ready_workers(service, "mlp")) == MIN
    with Load(service.address, "mlp", slow, clients=2, in_flight=4):

        def all_serve() -> bool:
            workers = ready_workers(service, "mlp")
            return len(workers) == MAX and all(each.served for each in workers)

        until(all_serve, f"{MAX} workers have answered")
        number = model_status(service, "mlp").workers
        assert number is not None
        assert (number.target, number.min, number.max, number.reason) == (MAX, MIN, MAX, "requests waited")
    # One request at a time keeps one worker busy while the others are stopped.
    with Load(service.address, "mlp", questions, clients=1, in_flight=1) as load:
        until(lambda: len(processes(service, "mlp", "worker")) == MIN, f"{MIN} worker is left")
        load.wait_for(10)
    status = model_status(service, "mlp")
    assert (status.state, status.failed, status.unexpected_exits) == ("serving", 0, 0)
    assert status.executions is not None
    assert status.executions.retried == 0
    assert status.workers is not None
    assert (status.workers.target, status.workers.reason) == (MIN, "further workers were idle for 1 s (the minimum)")
    assert " lost: " not in service.log
