from __future__ import annotations

import pytest

from weightd_daemon.generations import restarts


@pytest.fixture(autouse=True)
def _no_chance(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Delays are what they are without jitter, so that a test can say when a thing is due."""
    monkeypatch.setattr(restarts, "_JITTER", 0.0)
