"""Links of all pages in docs/."""

from __future__ import annotations

import pytest

from .page import DOCS, broken_links

PAGES = sorted(each.name for each in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    assert broken_links(page) == []
