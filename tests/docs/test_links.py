"""Links of all pages in docs/ lead to existing files and headings."""

from __future__ import annotations

import pytest

from .page import DOCS, broken_links

PAGES = sorted(each.name for each in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    assert broken_links(page) == []
