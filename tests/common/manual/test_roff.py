from __future__ import annotations

import re
import shutil
import subprocess
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.manual.roff import ManPage, bold, escape, prose

WIDE = 4096


def shown(source: str, width: int = WIDE) -> List[str]:
    """The lines of a page as a terminal has them, without blank ones and the title; a warning of roff is a failure."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-k", "-ww", "-man", "-Tutf8", "-P-cbou", f"-rLL={width}n"]
    done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    return [line for line in done.stdout.decode().splitlines()[1:-1] if line]


@pytest.fixture
def page() -> ManPage:
    return ManPage("thing", 8, "1.2", "does it")


def test_a_page(page: ManPage) -> None:
    page.heading("DESCRIPTION")
    page.text("First\nparagraph.\n\nSecond, with `code`:\n\n  $ run -it\n    'more'\n.not a request")
    page.entry(bold("--size"), "How\nmuch.\n\nNot little.")
    page.see_also([("other", 1)])
    assert page.source().startswith('.TH "THING" "8" "" "weightd 1.2" "weightd"\n')
    assert shown(page.source()) == [
        "NAME",
        "       thing - does it",
        "DESCRIPTION",
        "       First paragraph.",
        "       Second, with code:",
        "           $ run -it",
        "             'more'",
        "       .not a request",
        "       --size How much.",
        "              Not little.",
        "SEE ALSO",
        "       other(1)",
    ]


@pytest.mark.parametrize("text", [".so /etc/passwd", "'br", "a \\n(.z b", "-", '"a" b', "~^`", "\\fB\\", "\\*[x]"])
def test_text_is_shown_as_it_is(page: ManPage, text: str) -> None:
    page.heading("X")
    page.text(text)
    assert shown(page.source())[-1].strip() == text


def test_no_word_is_hyphenated(page: ManPage) -> None:
    long = "considerations of interpreters and of their configuration " * 20
    page.heading("X")
    page.synopsis(["x"])
    page.text(f"{long}\n\n  code\n\n{long}")
    page.subheading("x")
    page.entry("x", long)
    page.text(long)
    assert not [line for line in shown(page.source(), 60) if "\u2010" in line]


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_no_text_begins_a_request(text: str) -> None:
    assert not re.search(r"^[.']", escape(text), re.MULTILINE)
    assert not re.search(r"^[.']", prose(text), re.MULTILINE)
