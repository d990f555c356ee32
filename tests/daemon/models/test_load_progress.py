"""Tests of load estimates: progress never decreases and stays below 100 %, and unknown values stay unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.models.load_progress import LoadEstimate, LoadProgress, LoadSpeed
from weightd_protocol.schema import FieldError, decode, plain

MB = 10**6
SECONDS = st.floats(0, 1e6)
PACES = st.builds(LoadSpeed, st.integers(0, 2**40), SECONDS, st.none() | SECONDS)
STEPS = st.lists(
    st.tuples(SECONDS, st.sampled_from(["copying", "copying", "pinned", "loads", "wait"]), st.integers(0, 2**40)),
    max_size=20,
)


@given(st.none() | PACES, STEPS, st.integers(0, 2**40))
def test_progress_never_decreases_or_completes_early(
    before: LoadSpeed | None, steps: list[tuple[float, str, int]], nbytes: int
) -> None:
    now = 1000.0
    load = LoadEstimate(before, now)
    rounded_progress = 0.0
    for seconds, step, copied in steps:
        now += seconds
        if step == "copying":
            load.on_copy_progress(copied, nbytes)
        elif step == "pinned":
            load.on_copied(nbytes, now)
        elif step == "loads":
            load.on_load_started(now)
        share = load.progress(now)
        assert (share.fraction_done is None) >= (before is None)
        assert share.remaining_s is None or (share.remaining_s > 0 and share.fraction_done is not None)
        assert share.fraction_copied is None or 0 < share.fraction_copied <= 1
        if share.fraction_done is not None:
            assert rounded_progress <= share.fraction_done <= 0.99
            rounded_progress = share.fraction_done


def rounded_progress(load: LoadEstimate, now: float) -> tuple[float, float]:
    """Return fraction done and remaining seconds, both known, without rounding errors."""
    share = load.progress(now)
    assert share.fraction_done is not None
    assert share.remaining_s is not None
    return round(share.fraction_done, 6), round(share.remaining_s, 6)


def test_same_speed_gives_exact_estimate() -> None:
    load = LoadEstimate(LoadSpeed(100 * MB, 60.0, 40.0), 0.0)
    assert load.progress(1.0) == LoadProgress(0.01, 99.0)
    load.on_copy_progress(25 * MB, 100 * MB)
    assert load.progress(10.0) == LoadProgress(0.1, 90.0, 0.25)
    load.on_copied(100 * MB, 40.0)
    assert load.progress(45.0) == LoadProgress(0.4, None)  # The duration of the wait for memory is unknown.
    load.on_load_started(50.0)
    assert rounded_progress(load, 80.0) == (0.7, 30.0)
    assert load.progress(109.0).remaining_s == 1.0
    assert load.on_serving(110.0) == LoadSpeed(100 * MB, 60.0, 40.0)


def test_slower_copy_does_not_decrease_progress() -> None:
    load = LoadEstimate(LoadSpeed(100 * MB, 60.0, 40.0), 0.0)
    assert load.progress(20.0).fraction_done == 0.2
    load.on_copy_progress(5 * MB, 100 * MB)
    assert load.progress(20.0) == LoadProgress(0.2, 440.0, 0.05)


def test_larger_file_takes_proportionally_longer() -> None:
    load = LoadEstimate(LoadSpeed(100 * MB, 10.0, 1.0), 0.0)
    load.on_copy_progress(10 * MB, 200 * MB)
    assert rounded_progress(load, 1.0) == (0.025, 39.0)
    load.on_copied(200 * MB, 20.0)
    load.on_load_started(20.0)
    assert rounded_progress(load, 30.0) == (0.75, 10.0)


def test_load_without_copy_keeps_known_copy_time() -> None:
    load = LoadEstimate(LoadSpeed(100 * MB, 10.0, 30.0), 0.0)
    load.on_copied(100 * MB, 0.0)
    load.on_load_started(0.0)
    assert load.progress(5.0) == LoadProgress(0.5, 5.0)
    assert load.on_serving(12.0) == LoadSpeed(100 * MB, 12.0, 30.0)


def test_slower_load_approaches_but_never_reaches_100_percent() -> None:
    load = LoadEstimate(LoadSpeed(0, 10.0), 0.0)
    load.on_load_started(0.0)
    shares = [load.progress(seconds) for seconds in (9.0, 9.9, 10.0, 11.0, 20.0, 1000.0)]
    assert [each.remaining_s is None for each in shares] == [False, False, True, True, True, True]
    done = [each.fraction_done or 0.0 for each in shares]
    assert done == sorted(done)
    assert (round(done[0], 6), done[-1]) == (0.9, 0.99)
    assert 0.94 < done[2] < done[3] < done[4]


def test_first_load_knows_only_copy_progress() -> None:
    load = LoadEstimate(None, 0.0)
    assert load.progress(5.0) == LoadProgress()
    load.on_copy_progress(3, 4)
    assert load.progress(10.0) == LoadProgress(fraction_copied=0.75)
    load.on_copied(4, 10.0)
    load.on_load_started(10.0)
    assert load.progress(15.0) == LoadProgress()
    assert load.on_serving(30.0) == LoadSpeed(4, 20.0, 10.0)


def test_load_without_start_gives_no_speed() -> None:
    load = LoadEstimate(None, 0.0)
    assert load.on_serving(1.0) is None


def test_implausible_speeds_give_no_estimate() -> None:
    load = LoadEstimate(LoadSpeed(1, 86400.0, 86400.0), 0.0)
    load.on_copy_progress(1, 2**40)
    load.on_copied(2**40, 1.0)
    load.on_load_started(1.0)
    assert load.progress(2.0).remaining_s is None
    with pytest.raises(FieldError, match="load_s"):
        decode(LoadSpeed, {"nbytes": 1, "load_s": 1e308})


def test_any_measured_speed_can_be_stored() -> None:
    load = LoadEstimate(None, 0.0)
    load.on_copy_progress(1, 1)
    load.on_copied(1, 1e9)
    load.on_load_started(1e9)
    pace = load.on_serving(3e9)
    assert pace is not None
    assert decode(LoadSpeed, plain(pace)) == pace
