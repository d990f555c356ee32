"""Tests of the number of workers that follows the load."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.workers import WorkerRange
from weightd_daemon.generations.actions import Send
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.worker_target import has_surplus_workers, set_worker_target
from weightd_daemon.models.scaling.policy import WAIT_S, WorkerLoad, WorkerScaling, WorkerUse
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import Hello, Stop
from weightd_protocol.version import VERSION

from .fakehost import ATTACHED, CPU, HOLDER, SHA, W1, W2, W3, ModelHarness
from .test_resume import DaemonHarness

IDLE_S = 30.0
BOUNDS = WorkerRange(1, 8, IDLE_S)
NEVER = float("inf")


class Workers:
    """A model on one device whose workers start at once."""

    def __init__(self, bounds: WorkerRange = BOUNDS, target: int = 1) -> None:
        self.scaling = WorkerScaling(bounds, 1)
        self.now = 100.0
        self.target = target
        self.idle_since: list[float | None] = []

    def after(self, seconds: float, waiting: int, busy: int = 0, *, missing: int = 0) -> int:
        """Let time pass, and return the new number of workers; the first `busy` workers have batches."""
        self.now += seconds
        known = [*self.idle_since, *[self.now] * self.target][: self.target - missing]
        self.idle_since = [
            None if index < busy else self.now if since is None else since for index, since in enumerate(known)
        ]
        uses = [WorkerUse(f"w{index}", "cpu", since) for index, since in enumerate(self.idle_since)]
        self.target = self.scaling.decide(self.target, WorkerLoad(waiting, uses), self.now)
        return self.target


def test_number_grows_only_after_requests_have_waited() -> None:
    workers = Workers()
    assert workers.after(0.0, waiting=3, busy=1) == 1
    assert workers.scaling.next_check_at == workers.now + WAIT_S
    assert workers.after(WAIT_S / 2, waiting=0, busy=1) == 1
    assert workers.after(WAIT_S / 2, waiting=3, busy=1) == 1
    assert (workers.after(WAIT_S, waiting=3, busy=1), workers.scaling.reason) == (2, "requests waited")


def test_number_at_most_doubles_and_stays_within_bounds() -> None:
    workers = Workers()
    workers.after(0.0, waiting=100, busy=1)
    grown = [workers.after(WAIT_S, waiting=100, busy=workers.target) for _ in range(10)]
    assert [each for index, each in enumerate(grown) if each not in grown[:index]] == [2, 4, 8]
    assert workers.scaling.wait_limit_s(8) == NEVER


def test_number_grows_by_no_more_than_requests_that_wait() -> None:
    workers = Workers(target=4)
    workers.after(0.0, waiting=1, busy=4)
    assert workers.after(WAIT_S, waiting=1, busy=4) == 5


def test_growth_waits_until_last_growth_is_effective() -> None:
    workers = Workers(target=2)
    workers.after(0.0, waiting=9, busy=1, missing=1)
    assert workers.after(10 * WAIT_S, waiting=9, busy=1, missing=1) == 2
    assert workers.after(WAIT_S, waiting=9, busy=2) == 4


def test_only_workers_that_stay_idle_are_stopped() -> None:
    workers = Workers(target=4)
    assert workers.after(0.0, waiting=0, busy=2) == 4
    assert workers.scaling.next_check_at == workers.now + IDLE_S
    assert workers.after(IDLE_S - 1, waiting=0, busy=2) == 4
    assert workers.after(1.0, waiting=0, busy=2) == 2
    assert workers.scaling.reason == "further workers were idle for 30 s"
    assert workers.after(1.0, waiting=0, busy=0) == 2
    assert workers.after(IDLE_S, waiting=0, busy=0) == 1
    assert workers.scaling.reason == "further workers were idle for 30 s (the minimum)"
    assert workers.scaling.next_check_at == NEVER, "an idle model with the fewest workers must cause no wake-ups"


def test_worker_is_kept_for_a_while_after_growth() -> None:
    """A new worker has not answered anything, and a resumed daemon does not know what its workers have done."""
    scaling = WorkerScaling(BOUNDS, 1)
    new = [WorkerUse("w1", "cpu", 0.0), WorkerUse("w2", "cpu", 0.0)]
    assert scaling.decide(2, WorkerLoad(0, new), 1000.0) == 2
    assert scaling.decide(2, WorkerLoad(0, new), 1000.0 + IDLE_S) == 1
    assert scaling.decide(1, WorkerLoad(1, new[:1]), 2000.0) == 1
    assert scaling.decide(1, WorkerLoad(1, new[:1]), 2000.0 + WAIT_S) == 2
    assert scaling.decide(2, WorkerLoad(0, new), 2000.0 + IDLE_S) == 2
    assert scaling.decide(2, WorkerLoad(0, new), 2001.0 + IDLE_S) == 1


def test_device_without_idle_worker_keeps_all() -> None:
    scaling = WorkerScaling(BOUNDS, 2)
    uses = [WorkerUse("a", "cpu:0", 0.0), WorkerUse("b", "cpu:0", 0.0), WorkerUse("c", "cpu:1", None)]
    scaling.decide(2, WorkerLoad(0, uses), 0.0)
    assert scaling.decide(2, WorkerLoad(0, [*uses, WorkerUse("d", "cpu:1", None)]), IDLE_S) == 2
    assert scaling.decide(2, WorkerLoad(0, [*uses, WorkerUse("d", "cpu:1", 0.0)]), IDLE_S) == 1


steps = st.lists(
    st.tuples(st.sampled_from([0.01, 0.05, 0.1, 1.0, 29.0, 31.0]), st.integers(0, 12), st.integers(0, 8)), max_size=40
)


@given(steps, st.integers(1, 4), st.integers(0, 6))
def test_number_is_bounded_and_does_not_oscillate(sequence: list[tuple[float, int, int]], low: int, extra: int) -> None:
    bounds = WorkerRange(low, low + extra, IDLE_S)
    workers = Workers(bounds, low)
    grown_at = -NEVER
    for seconds, waiting, busy in sequence:
        before, was_waiting = workers.target, workers.scaling.next_check_at
        after = workers.after(seconds, waiting, min(busy, before))
        assert bounds.min <= after <= bounds.max
        if after > before:
            assert waiting
            assert after <= 2 * before
            assert was_waiting <= workers.now
            grown_at = workers.now
        elif after < before:
            assert workers.now >= grown_at + IDLE_S
            assert before - after <= before - min(busy, before)
        assert workers.scaling.next_check_at > workers.now
        assert (workers.scaling.next_check_at < NEVER) == (after > bounds.min or bool(waiting and after < bounds.max))


# --- with a model -----------------------------------------------------------------------------------------------------


def scaled_model(**keys: Any) -> ModelHarness:
    """Return a loaded model with 1 to 3 workers."""
    # Without pings, which the test would have to answer.
    keys.setdefault("watchdog", 1e6)
    return ModelHarness(workers=WorkerRange(1, 3, IDLE_S), **keys).snapshot_taken().loads()  # type: ignore[arg-type]


def starts(harness: ModelHarness, *names: str) -> None:
    for name in names:
        harness.deliver(name, Hello("1", SHA, {"weightd": VERSION}, CPU)).deliver(name, ATTACHED)


def test_waiting_requests_start_workers_and_idle_ones_stop() -> None:
    harness = scaled_model()
    model, host = harness.model, harness.host
    assert host.spawned == [HOLDER, W1]
    harness.advance(1.0)
    assert model.timer.due_at > harness.now + WAIT_S
    numbers = harness.submit_new(5)
    assert model.timer.due_at == harness.now + WAIT_S
    model.on_reconciled(harness.now)
    assert model.timer.due_at == harness.now + WAIT_S, "another event must not postpone the check"
    harness.advance(WAIT_S).advance(WAIT_S)
    assert (host.spawned, model.workers.number) == ([HOLDER, W1, W2], (2, 1, 3, "requests waited"))
    starts(harness, W2)
    harness.advance(WAIT_S).advance(WAIT_S)
    starts(harness, W3)
    assert host.spawned == [HOLDER, W1, W2, W3]
    given = host.predicts()
    assert {name for name, _ in given} == {W1, W2, W3}
    assert {number for _, number in given} == {*numbers}
    assert model.timer.due_at < harness.now + IDLE_S
    harness.now += IDLE_S - 1.0
    for name, number in given:
        harness.answers(name, number)
    harness.advance(IDLE_S - 1.0)
    assert host.orders_of(Stop) == []
    running = harness.submit_new(1)
    assert host.predicts() == [(W1, running[0])]
    harness.advance(1.0)
    assert host.orders_of(Stop) == [(W2, Stop()), (W3, Stop())]
    assert not model.deployments.deaths
    for name in (W2, W3):
        model.deployments.process_events.on_exit(name, ExitCause(0), harness.now)
    harness.answers(W1, *running).advance(100 * IDLE_S)
    assert {*host.answers} == {*numbers, *running}
    assert (host.spawned, model.deployments.deaths) == ([HOLDER, W1, W2, W3], 0)
    assert [each.worker_target for each in model.deployments] == [1]


def test_batch_behind_running_one_counts_as_waiting() -> None:
    """A worker that was quick receives a second batch, which then waits although the queue is empty."""
    harness = scaled_model()
    harness.submit_new(2)
    assert [name for name, _ in harness.host.predicts()] == [W1, W1]
    harness.advance(WAIT_S).advance(WAIT_S)
    assert harness.host.spawned == [HOLDER, W1, W2]


def test_busy_surplus_worker_stops_after_its_batch() -> None:
    harness = scaled_model()
    for name in (W2, W3):
        harness.submit_new(3)
        harness.advance(WAIT_S).advance(WAIT_S)
        starts(harness, name)
    generation = harness.model.readiness.main_generation
    set_worker_target(generation, 1, [W2], harness.now)
    assert has_surplus_workers(generation)
    set_worker_target(generation, 1, [W3, W1], harness.now)
    assert not has_surplus_workers(generation)
    assert [name for name, _ in generation_orders(generation)] == [W2, W3]


def generation_orders(generation: GenerationBase) -> list[tuple[str, Any]]:
    return [(each.name, each.order) for each in generation.take_actions() if isinstance(each, Send)]


def test_update_starts_as_many_workers_as_serve() -> None:
    harness = scaled_model()
    [deployment] = harness.model.deployments
    deployment.worker_target = 3
    harness.update().snapshot_taken()
    assert deployment.loading is not None
    assert deployment.loading.wanted_process_count == 3


def test_next_daemon_keeps_workers_until_they_are_idle() -> None:
    config = ModelConfig("/m.onnx", engine="onnxruntime", workers=WorkerRange(1, 3, IDLE_S), start="spawn")
    daemon = DaemonHarness().started(m=config)
    [deployment] = daemon.registry.models["m"].deployments
    deployment.worker_target = 2
    set_worker_target(daemon.generation(), 2, [], daemon.now)
    daemon.registry.models["m"].deployments.reconcile(daemon.now)
    for message in (Hello("1", SHA, {"weightd": VERSION}, CPU), ATTACHED):
        daemon.registry.models["m"].deployments.process_events.on_message("m.1.w2", message, [], daemon.now)
    following = daemon.restarted(m=config).reconnect()
    model = following.registry.models["m"]
    assert model.timer.due_at <= following.now
    model.tick(following.now)
    assert model.workers.number is not None
    assert (model.workers.number.target, daemon.host.spawned, daemon.host.orders_of(Stop)) == (2, [], [])
    model.tick(following.now + IDLE_S)
    assert model.workers.number.target == 1
    assert len(daemon.host.orders_of(Stop)) == 1


def test_unloaded_model_starts_with_fewest_workers() -> None:
    harness = scaled_model(load="on_demand")
    [deployment] = harness.model.deployments
    deployment.worker_target = 3
    harness.model.deployments.unload(harness.now)
    assert deployment.worker_target == 1


def test_fixed_number_causes_no_work() -> None:
    harness = ModelHarness(workers=1).serving()
    harness.submit_new(5)
    harness.advance(WAIT_S).advance(10.0)
    assert (harness.model.workers.number, harness.model.workers.next_event_at) == (None, NEVER)
    assert harness.host.spawned == [HOLDER, W1]
