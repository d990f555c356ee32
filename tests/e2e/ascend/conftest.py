from __future__ import annotations

import pytest

from .support import Cards, make_host


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Cards:
    """The cards that the tests of a file share."""
    return make_host(tmp_path_factory.mktemp("cards"))
