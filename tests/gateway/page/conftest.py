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

# For everything that is waited for and must happen; a machine that is busy with other work needs it.
LIMIT_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Where CI=true, it must be there."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    with sync_playwright() as playwright:
        # What is shown is our own; in a container there are no namespaces for its sandbox.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    """Serves the page; it has no picture until it is told one."""
    with PageServer(lambda _: StatusReply(200, status_json(None))) as serving:
        yield serving


class Windows:
    """Has the page open, in windows of any kind.

    Attributes:
        complaints: what the browser or the page has said on the console, and exceptions.
        asked: each address that was asked for.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self.complaints: list[str] = []
        self.asked: list[str] = []

    def open(self, width: int = 1180, scheme: Literal["light", "dark"] = "light") -> Page:
        """Open the page."""
        context = self._browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(self._url)
        return page

    def close(self) -> None:
        """Close all of them."""
        for context in self._browser.contexts:
            context.close()


@pytest.fixture
def windows(browser: Browser, server: PageServer) -> Iterator[Windows]:
    """Opens the page; nothing may go wrong there, and nobody else be asked anything."""
    made = Windows(browser, server.url)
    yield made
    made.close()
    assert made.complaints == []
    assert [url for url in made.asked if not url.startswith((server.url, "data:"))] == []


def tells(overview: Overview | None, age_s: float = 0.0, error: str = "") -> Callable[[str], StatusReply]:
    """Return what has a server tell this picture."""
    body = status_json(overview, age_s, error)
    return lambda _: StatusReply(200, body)
