"""Tests of the files of the status page and their headers."""

from __future__ import annotations

import re

import pytest

from weightd_gateway.page.files import FILES, HEADERS, STATUS_HEADERS

TYPES = {"/": "text/html", "/app.js": "text/javascript", "/style.css": "text/css"}


@pytest.mark.parametrize(("path", "content_type"), TYPES.items())
def test_each_file_has_type_and_etag(path: str, content_type: str) -> None:
    headers = FILES[path].headers
    assert FILES[path].content_type == f"{content_type}; charset=utf-8"
    assert (headers["ETag"], headers["Cache-Control"]) == (FILES[path].etag, "no-cache")
    assert re.fullmatch(r'"[0-9a-f]{16}"', FILES[path].etag)
    assert FILES[path].body


def test_files_are_complete_and_distinct() -> None:
    assert set(FILES) == set(TYPES)
    assert len({each.etag for each in FILES.values()}) == 3


@pytest.mark.parametrize("headers", [*(each.headers for each in FILES.values()), STATUS_HEADERS])
def test_content_security_policy(headers: dict[str, str]) -> None:
    assert HEADERS.items() <= headers.items()
    policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {each: policy[each] for each in ("script-src", "style-src", "connect-src")} == dict.fromkeys(
        ("script-src", "style-src", "connect-src"), "'self'"
    )
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_numbers_are_not_cached() -> None:
    assert STATUS_HEADERS["Cache-Control"] == "no-store"


def test_files_name_no_other_host_and_inject_no_markup() -> None:
    for path, file in FILES.items():
        text = file.body.decode()
        assert set(re.findall(r"https?://[^'\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            path
        )
        assert not re.search(r"\bon\w+=|style=|<style|javascript:", text), path
