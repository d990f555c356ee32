"""How much the property tests try, and which files come first."""

from __future__ import annotations

import gc
from typing import List

import pytest
from hypothesis import HealthCheck, Phase, settings

from testkit.examples import examples

# A busy machine is no failure: pytest's own timeout bounds a test.
settings.register_profile(
    "weightd", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
# Mutation tests only need to know whether a test fails: to find the smallest example can take a minute.
settings.register_profile(
    "mutation", settings.get_profile("weightd"), phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
settings.load_profile("weightd")

# Thousands of tests stay as long as the process: to look for garbage among them again and again takes a sixth of it.
gc.disable()


def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """What starts daemons comes first: a file that takes a minute must not be the last one, beside an idle core."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


def pytest_collection_finish() -> None:
    """No later collection looks at what is there now."""
    gc.freeze()
    gc.enable()
