from __future__ import annotations

from pathlib import Path

import pytest

from testkit.fakedaemon import client, daemon, directory

__all__ = ["client", "daemon", "directory"]


@pytest.fixture(params=["unix", "ipc"])
def address(request: pytest.FixtureRequest, directory: Path) -> str:
    """Return an address without a listener; the tests run over both transports."""
    return f"{request.param}://{directory}/d.sock"
