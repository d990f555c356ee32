from __future__ import annotations

from weightd_daemon.counters.model_counters import ModelCounters, ProcessCounters
from weightd_daemon.counters.registry import CounterRegistry


def test_as_many_are_started_again_as_were_lost() -> None:
    meter = ModelCounters()
    mishaps = ProcessCounters(meter)
    for _ in range(3):
        mishaps.on_started()
    assert meter.restarts == 0
    mishaps.on_death()
    mishaps.on_lost(2)
    for _ in range(5):
        mishaps.on_started()
    assert (meter.unexpected_exits, meter.restarts) == (1, 2)


def test_what_befalls_a_process_of_several_models_befalls_each() -> None:
    one, two = ModelCounters(), ModelCounters()
    mishaps = ProcessCounters(one, two)
    mishaps.on_death()
    mishaps.on_selftest_failed()
    mishaps.on_batch_mismatch()
    for each in (one, two):
        assert (each.unexpected_exits, each.selftest_failures, each.batch_mismatches) == (1, 1, 1)
    ProcessCounters().on_death()


def test_a_model_that_is_gone_takes_its_own_with_it() -> None:
    meters = CounterRegistry()
    meters.counters_of("m").unexpected_exits = 1
    meters.counters_of("n").unexpected_exits = 2
    assert meters.counters_of("m") is meters.counters_of("m")
    meters.keep_only(["m"])
    assert [each.model for each in meters.records()] == ["m"]
    assert (meters.counters_of("m").unexpected_exits, meters.counters_of("n").unexpected_exits) == (1, 0)
