"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure: pytest's own timeout bounds a test.
settings.register_profile("weightd", deadline=None)
settings.load_profile("weightd")
