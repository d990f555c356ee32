from __future__ import annotations

from pathlib import Path

import pytest

from ascendsim import Host, models

from .support import MODEL, WIDTH, Cards


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    host = Host(tmp_path / "host", cards=2)
    return Cards(tmp_path, host, models.mlp(tmp_path / f"{MODEL}.mindir", width=WIDTH))
