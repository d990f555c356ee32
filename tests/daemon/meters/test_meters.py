from __future__ import annotations

from weightd.daemon.meters.meter import Meter, Mishaps
from weightd.daemon.meters.meters import Meters


def test_as_many_are_started_again_as_were_lost() -> None:
    meter = Meter()
    mishaps = Mishaps(meter)
    for _ in range(3):
        mishaps.started()
    assert meter.restarts == 0
    mishaps.died()
    mishaps.lost(2)
    for _ in range(5):
        mishaps.started()
    assert (meter.deaths, meter.restarts) == (1, 2)


def test_what_befalls_a_process_of_several_models_befalls_each() -> None:
    one, two = Meter(), Meter()
    mishaps = Mishaps(one, two)
    mishaps.died()
    mishaps.canary_failed()
    mishaps.differed()
    for each in (one, two):
        assert (each.deaths, each.canary_failures, each.mismatches) == (1, 1, 1)
    Mishaps().died()


def test_a_model_that_is_gone_takes_its_own_with_it() -> None:
    meters = Meters()
    meters.of("m").deaths = 1
    meters.of("n").deaths = 2
    assert meters.of("m") is meters.of("m")
    meters.keep(["m"])
    assert [each.model for each in meters.records()] == ["m"]
    assert (meters.of("m").deaths, meters.of("n").deaths) == (1, 0)
