"""Tests of the choice of a version, and of rollouts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.api.version_sets import VersionReadiness, VersionSet
from weightd_daemon.config.versions import VersionSetConfig
from weightd_protocol.errors import FailedPrecondition, InvalidArgument

UNAVAILABLE, UNPROVEN, LOADABLE, SERVING = VersionReadiness
IDS = [f"{process}-{number}" for process in range(10) for number in range(1000)]


def all_serve(version: int) -> VersionReadiness:
    return SERVING


def counts(version_set: VersionSet) -> Counter[int]:
    return Counter(version_set.choose(each, all_serve) for each in IDS)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ({1: SERVING, 2: SERVING, 3: SERVING}, 3),
        ({1: SERVING, 2: SERVING, 3: LOADABLE}, 2),
        ({1: LOADABLE, 2: LOADABLE, 3: UNAVAILABLE}, 2),
        ({1: LOADABLE, 2: UNPROVEN, 3: UNPROVEN}, 1),
        ({1: UNAVAILABLE, 2: UNPROVEN, 3: UNPROVEN}, 3),
        ({1: UNAVAILABLE, 2: UNAVAILABLE, 3: UNAVAILABLE}, 3),
    ],
)
def test_newest_version_that_serves_is_the_default(states: dict[int, VersionReadiness], expected: int) -> None:
    assert VersionSet("m", VersionSetConfig((1, 2, 3))).choose("id", states.__getitem__) == expected


def test_traffic_follows_the_weights() -> None:
    found = counts(VersionSet("m", VersionSetConfig((1, 2, 3), ((1, 90), (3, 10)))))
    assert set(found) == {1, 3}
    assert 800 < found[3] < 1200


def test_request_id_decides() -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2), ((1, 1), (2, 1))))
    assert [version_set.choose(each, all_serve) for each in IDS] == [
        version_set.choose(each, all_serve) for each in IDS
    ]


def test_unavailable_version_gets_no_traffic() -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2), ((1, 1), (2, 1))))
    states = {1: SERVING, 2: UNAVAILABLE}
    assert {version_set.choose(each, states.__getitem__) for each in IDS} == {1}


def test_rollout_replaces_traffic_until_it_is_aborted() -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2, 3), ((1, 60), (2, 40))))
    version_set.start_rollout(3, 50.0, default=3)
    assert version_set.shares == pytest.approx({1: 0.3, 2: 0.2, 3: 0.5})
    version_set.promote(3)
    assert counts(version_set) == {3: len(IDS)}
    version_set.abort()
    assert version_set.shares == pytest.approx({1: 0.6, 2: 0.4})
    with pytest.raises(FailedPrecondition, match="no rollout of m is in progress"):
        version_set.abort()


@pytest.mark.parametrize("percent", [0.0, 100.0])
def test_rollout_of_nothing_and_of_everything(percent: float) -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2)))
    version_set.start_rollout(2, percent, default=1)
    assert version_set.shares == {2 if percent else 1: 1.0}


def test_default_version_cannot_leave_requests_to_nobody() -> None:
    with pytest.raises(FailedPrecondition, match="version 2 of m already answers all requests"):
        VersionSet("m", VersionSetConfig((1, 2))).start_rollout(2, 10.0, default=2)


def test_unknown_version_is_rejected() -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2)))
    with pytest.raises(InvalidArgument, match="version: expected one of 1, 2 of m, got 3"):
        version_set.start_rollout(3, 10.0, default=2)
    with pytest.raises(InvalidArgument, match="version: expected one of 1, 2 of m, got 3"):
        version_set.promote(3)
    assert not version_set.rollout


def test_rollout_ends_with_its_version() -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2)))
    version_set.promote(1)
    version_set.configure(VersionSetConfig((1, 2, 3)))
    assert version_set.rollout
    version_set.configure(VersionSetConfig((2, 3)))
    assert not version_set.rollout


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(1, 5), st.floats(0, 100)),
            st.tuples(st.just("promote"), st.integers(1, 5), st.just(0.0)),
            st.tuples(st.just("abort"), st.just(0), st.just(0.0)),
        )
    ),
    st.dictionaries(st.integers(1, 4), st.integers(1, 1000)),
)
def test_shares_always_add_up(steps: list[tuple[str, int, float]], traffic: dict[int, int]) -> None:
    version_set = VersionSet("m", VersionSetConfig((1, 2, 3, 4), tuple(sorted(traffic.items()))))
    for action, version, percent in steps:
        try:
            if action == "set":
                version_set.start_rollout(version, percent, default=4)
                assert version_set.shares.get(version, 0.0) == pytest.approx(percent / 100)
            elif action == "promote":
                version_set.promote(version)
            else:
                version_set.abort()
        except (InvalidArgument, FailedPrecondition):
            continue
        assert sum(version_set.shares.values()) == pytest.approx(1.0 if version_set.shares else 0.0)
        assert all(0 <= share <= 1 for share in version_set.shares.values())
        assert all(version_set.choose(each, all_serve) in (version_set.shares or {4: 1.0}) for each in IDS[:20])
