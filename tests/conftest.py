"""Settings of all tests: Hypothesis profiles, order of the files, and garbage collection."""

from __future__ import annotations

import gc
from typing import List

import pytest
from hypothesis import HealthCheck, Phase, settings

from testkit.examples import examples

# A slow example is not a failure on a busy machine; pytest's timeout limits each test.
settings.register_profile(
    "weightd", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
# Mutation tests only need to know whether a test fails; shrinking an example can take a minute.
settings.register_profile(
    "mutation", settings.get_profile("weightd"), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
settings.load_profile("weightd")

# The collected tests live as long as the process; searching them for garbage repeatedly takes a sixth of the time.
gc.disable()


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Run tests that start daemons first, so that no slow file runs last while other cores are idle."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from later garbage collections."""
    gc.freeze()
    gc.enable()
