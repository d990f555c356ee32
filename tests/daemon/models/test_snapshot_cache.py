"""Tests of the limit for snapshots in the cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.models.residency.snapshot_cache import CachedModel, excess_models

MODELS = st.lists(
    st.builds(CachedModel, st.text(min_size=1), st.integers(1, 100), st.floats(0, 10), st.booleans()),
    max_size=8,
    unique_by=lambda each: each.name,
)


def test_least_recently_used_models_leave_first() -> None:
    cached = [CachedModel(name, 10, used_at, is_in_use=False) for name, used_at in (("a", 3), ("b", 1), ("c", 2))]
    assert excess_models(cached, 30) == []
    assert excess_models(cached, 29) == ["b"]
    assert excess_models(cached, 19) == ["b", "c"]
    assert excess_models(cached, 0) == ["b", "c", "a"]


@given(MODELS, st.integers(0, 500))
def test_limit_is_kept_without_models_in_use(cached: list[CachedModel], max_bytes: int) -> None:
    removed = excess_models(cached, max_bytes)
    kept = [each for each in cached if each.name not in removed]
    assert all(not each.is_in_use for each in cached if each.name in removed)
    assert sum(each.nbytes for each in kept) <= max_bytes or all(each.is_in_use for each in kept)
    # No model leaves without need.
    sizes = {each.name: each.nbytes for each in cached}
    assert not removed or sum(each.nbytes for each in kept) + sizes[removed[-1]] > max_bytes
