"""A model whose workers also run requests of direct channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightd_daemon.config.workers import WorkerRange
from weightd_daemon.models.scaling.policy import WAIT_S
from weightd_daemon.scheduling.direct import DirectLoss, DirectRuns, DirectWorker, NoDirectWorkers
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import DEFAULT_TENANT
from weightd_protocol.messages.worker import CancelPredict, Hello, Stop
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, CPU, HOLDER, SHA, W1, W2, ModelHarness, request

LOSS = DirectLoss(b"hostile", "7", ClientOrigin("process 13 of user 7", "user 7"), DEFAULT_TENANT, 1.0)
WAITING = ClientOrigin("process 14 of user 8", "user 8")


class Channels(NoDirectWorkers):
    """The direct channels of all models, whose requests the test reports."""

    def __init__(self) -> None:
        self.workers: dict[str, DirectWorker] = {}
        self.loss: DirectLoss | None = None
        self.running: set[str] = set()
        self.waiting = 0
        self.on_remove: Callable[[], object] = lambda: None

    def is_running(self, process: str) -> bool:
        return process in self.running

    def waiting_count(self, model: str) -> int:
        return self.waiting

    def add_worker(self, worker: DirectWorker, now: float) -> None:
        self.workers[worker.process] = worker

    def remove_worker(self, process: str, now: float) -> DirectLoss | None:
        self.on_remove()
        return self.loss


def serving(workers: Any = 2, **config: Any) -> tuple[ModelHarness, Channels]:
    channels = Channels()
    harness = ModelHarness(workers=workers, shared=SharedScheduling(direct=channels), **config)
    return harness.serving(), channels


def blamed(harness: ModelHarness) -> set[str]:
    """Return the clients that have been blamed for the exit of a worker."""
    return {name for offenders in harness.model.dispatcher.isolator.grounds[:2] for name in offenders}


def test_crash_in_a_channel_request_is_not_blamed_on_the_waiting_batch() -> None:
    harness, channels = serving(workers=1)
    channels.loss = LOSS
    waiting = request(origin=WAITING)
    harness.submit(waiting)
    assert harness.host.predicts() == [(W1, waiting.number)]
    harness.exit_process(W1)
    assert blamed(harness) == {LOSS.origin.peer, LOSS.origin.principal}
    harness.advance(40.0).loads(1)
    assert (harness.host.predicts(), waiting.deaths) == ([(W2, waiting.number)], 0)


def test_request_of_a_channel_that_ends_is_not_dispatched_to_the_dead_worker() -> None:
    harness, channels = serving(workers=1)
    channels.on_remove = lambda: harness.submit(request(origin=WAITING))
    harness.exit_process(W1)
    assert (harness.host.predicts(), blamed(harness)) == ([], set())


def test_hung_channel_request_is_not_blamed_on_the_waiting_batch() -> None:
    harness, channels = serving(workers=1)
    harness.submit(request(origin=WAITING))
    channels.workers[W1].on_fault(W1, LOSS, "hung", harness.now)
    assert (harness.host.aborted, blamed(harness)) == ([W1], {LOSS.origin.peer, LOSS.origin.principal})
    harness.exit_process(W1)
    assert blamed(harness) == {LOSS.origin.peer, LOSS.origin.principal}


def test_batch_behind_long_channel_request_is_recalled() -> None:
    harness, channels = serving()
    [number] = harness.submit_new(1)
    channels.workers[W1].on_active(W1, 1.0, harness.now)
    assert harness.host.predicts() == [(W1, number), (W2, number)]
    assert harness.host.orders_of(CancelPredict) == [(W1, CancelPredict(number))]
    more = harness.submit_new(3)
    assert harness.host.predicts() == [(W2, more[0])]
    channels.workers[W1].on_active(W1, None, harness.now)
    assert harness.host.predicts() == [(W1, more[1]), (W1, more[2])]


@pytest.mark.parametrize(("running", "spawned"), [(set[str](), [HOLDER, W1]), ({W1}, [HOLDER, W1, W2])])
def test_requests_that_wait_in_channels_start_workers(running: set[str], spawned: list[str]) -> None:
    harness, channels = serving(WorkerRange(1, 3, 30.0), watchdog=1e6)
    harness.advance(1.0)
    channels.running, channels.waiting = running, 1
    channels.workers[W1].on_active(W1, 0.01, harness.now)
    assert harness.model.timer.due_at <= harness.now
    harness.advance(0.0).advance(WAIT_S).advance(WAIT_S)
    assert harness.host.spawned == spawned


@pytest.mark.parametrize(("run_s", "stopped"), [(0.02, [W2]), (0.16, [])])
def test_workers_that_channels_need_are_not_idle(run_s: float, stopped: list[str]) -> None:
    """Both workers take requests in turn; whether both are needed depends on the time for which the requests run."""
    harness, channels = serving(WorkerRange(1, 2, 2.0), watchdog=1e6)
    channels.running, channels.waiting = {W1}, 1
    harness.advance(0.0).advance(WAIT_S).advance(WAIT_S)
    harness.deliver(W2, Hello("1", SHA, {"weightd": VERSION}, CPU)).deliver(W2, ATTACHED)
    channels.waiting = 0
    for tick in range(100):
        worker = channels.workers[(W1, W2)[tick % 2]]
        worker.on_ran(worker.process, DirectRuns(2, 0, run_s))
        worker.on_active(worker.process, None, harness.now)
        harness.advance(0.1)
    assert [name for name, _ in harness.host.orders_of(Stop)] == stopped
