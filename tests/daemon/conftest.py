from __future__ import annotations

import pytest

from weightd_daemon.generations import restarts


@pytest.fixture(autouse=True)
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Remove jitter from delays, so that tests can predict when events are due."""
    monkeypatch.setattr(restarts, "_JITTER", 0.0)
