"""Principals that have no direct channels to a model for some time."""

from __future__ import annotations

import pytest

from weightd_daemon.channels.exclusions import EXCLUSION_S, MAX_HANDED_OVER, ChannelExclusions
from weightd_protocol.errors import FailedPrecondition


def test_excluded_principal_has_no_channels_for_some_time() -> None:
    exclusions = ChannelExclusions()
    exclusions.exclude("ann", "m", "a request ran long", 5.0)
    with pytest.raises(FailedPrecondition, match="no direct channel to m for 59 s: a request ran long"):
        exclusions.check("ann", "m", 6.0)
    exclusions.check("ann", "other", 6.0)
    exclusions.check("bob", "m", 6.0)
    exclusions.check("ann", "m", 5.0 + EXCLUSION_S)


def test_handed_over_requests_are_limited_in_time() -> None:
    exclusions = ChannelExclusions()
    counts = [exclusions.count_handover("ann", "m", 1.0) for _ in range(MAX_HANDED_OVER + 1)]
    assert counts == [False] * MAX_HANDED_OVER + [True]
    assert not exclusions.count_handover("bob", "m", 1.0)
    assert not exclusions.count_handover("ann", "m", 1.0 + EXCLUSION_S)


def test_remembers_a_limited_number_of_principals() -> None:
    exclusions = ChannelExclusions()
    for number in range(3000):
        exclusions.exclude(str(number), "m", "late", 0.0)
        exclusions.count_handover(str(number), "m", 0.0)
    assert max(map(len, vars(exclusions).values())) <= 1024
    exclusions.check("0", "m", 1.0)
