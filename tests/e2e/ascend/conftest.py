from __future__ import annotations

import pytest

from .support import Cards, a_host


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Cards:
    """Those of the service that the tests of a file share."""
    return a_host(tmp_path_factory.mktemp("cards"))
