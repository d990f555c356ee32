"""Fixtures: a browser, and the status page in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from weightd_common.dashboard.overview import Overview
from weightd_gateway.page.api import status_json

from .pageserver import PageServer, StatusReply

HOW_TO_GET_IT = "no browser was found; on Debian: apt-get install chromium-headless-shell"

# The limit for every event that must happen; a busy machine needs it.
LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return Chromium. With CI=true a missing browser is an error."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    with sync_playwright() as playwright:
        # The page is trusted, and a container has no namespaces for Chromium's sandbox.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    """Return a server of the page without an overview until the test sets one."""
    with PageServer(lambda _: StatusReply(200, status_json(None))) as serving:
        yield serving


class Windows:
    """Browser windows with the page.

    Attributes:
        complaints: messages on the browser's console, and exceptions.
        asked: the requested addresses.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def open(self, width: int = 1180, scheme: Literal["light", "dark"] = "light") -> Page:
        context = self._browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(self._url)
        return page

    def close(self) -> None:
        """Close all windows."""
        for context in self._browser.contexts:
            context.close()


@pytest.fixture
def windows(browser: Browser, server: PageServer) -> Iterator[Windows]:
    """Return the windows; fail if the browser reports an error or contacts another host."""
    made = Windows(browser, server.url)
    yield made
    made.close()
    assert made.complaints == []
    assert [url for url in made.asked if not url.startswith((server.url, "data:"))] == []


def replies_with(overview: Overview | None, age_s: float = 0.0, error: str = "") -> Callable[[str], StatusReply]:
    """Return a function that replies with this overview."""
    body = status_json(overview, age_s, error)
    return lambda _: StatusReply(200, body)
