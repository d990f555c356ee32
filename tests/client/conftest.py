from __future__ import annotations

from pathlib import Path

import pytest

from testkit.fakedaemon import client, daemon, directory

__all__ = ["client", "daemon", "directory"]


@pytest.fixture(params=["unix", "ipc"])
def address(request: pytest.FixtureRequest, directory: Path) -> str:
    """Where nobody listens yet: both transports keep the same promises."""
    return f"{request.param}://{directory}/d.sock"
