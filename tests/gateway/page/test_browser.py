"""Tests of the status page in a real browser."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from playwright.sync_api import Page, expect

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_protocol.messages.metrics import ProcessCount

from .conftest import LIMIT_MS, Windows, replies_with
from .pageserver import PageServer, StatusReply

expect.set_options(timeout=LIMIT_MS)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def make_overview(*names: str) -> Overview:
    """Return an overview of models with four workers each; the last model has lost one."""
    history = History()
    for second in range(3):
        models = [looks.counted(name, (0, 400 * second, 0, 0), workers=4, queued=2, running=3) for name in names[:-1]]
        lost = (ProcessCount("worker", "ready", 3), ProcessCount("worker", "attaching", 1))
        models.append(looks.counted(names[-1], (0, 40 * second, 0, 0), processes=lost, unexpected_exits=1))
        accounts = looks.account(names[0], 440 * second, {"max_rate": 10 * second}, in_flight=5, queued=2)
        tenants = [looks.tenant("research", accounts, share=0.25), looks.tenant(names[-1])]
        history.on_metrics(looks.metrics(3600.0 + second, *models, tenants=tenants))
    statuses = [
        looks.model(name, looks.processes(name, 4, private=10 * MB, weights=200 * MB, served=7), copy=200 * MB)
        for name in names
    ]
    history.on_status(looks.status(3600.0, *statuses))
    return history.overview()


def row(page: Page, name: str) -> list[str]:
    """Return the texts in the cells of a model or tenant."""
    cells = page.locator("tr:not(.inside)", has=page.get_by_text(name, exact=True)).locator("> td")
    return [" ".join(text.split()) for text in cells.all_inner_texts()]


def width(page: Page, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["width"]


def test_shows_data_of_daemon(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", "reader"))
    page = windows.open()
    expect(page.locator("#health")).to_have_text("running, 2 models ready")
    expect(page.locator("#own")).to_be_hidden()
    assert page.title() == "running, 2 models ready – weightd"
    assert page.locator("#service").inner_text() == "0.1.0, up 1 h 0 min"
    assert row(page, "digits") == [
        "digits onnxruntime · cpu · generation 1", "serving", "4 of 4", "400 10.0 refused", "2", "5.50 ms", "9.91 ms",
        "250 MB plain 840 MB",
    ]  # fmt: skip
    assert row(page, "reader")[1:5] == ["serving", "3 of 4 1 crashed", "40.0", "0"]
    assert row(page, "research") == ["research", "1", "25 %", "440", "10.0", "5", "2", "2.00 ms", "880", "20"]
    tiles = [" ".join(text.split()) for text in page.locator(".tile").all_inner_texts()]
    assert tiles == [
        "Requests 440 per second, 10.0 refused",
        "99th percentile latency 9.91 ms median 5.50 ms",
        "Queued 2 3 running",
    ]
    assert page.locator(".tile .spark .curve").first.get_attribute("d") == "M58 1.00L59 1.00"


def test_bars_have_the_same_scale(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", "reader"))
    page = windows.open()
    texts = [" ".join(text.split()) for text in page.locator(".measure p").all_inner_texts()]
    assert texts == [
        "With weightd: one copy of the weights of each model, 8 workers 530 MB",
        "As 8 plain processes: one copy of the weights each 1.68 GB",
    ]
    bars = page.locator("#bars .bar")
    assert [bars.nth(index).locator("i").count() for index in range(2)] == [2 + 8 + 1, 2 * 8]
    whole = width(page, "#bars .plain .bar")
    copies = [width(page, f"#bars .{kind} .copy") for kind in ("with", "plain")]
    again = width(page, "#bars .plain .again")
    assert [*copies, again] == pytest.approx([whole * 200 / 1680] * 3, rel=0.01)
    assert page.locator("#bars .plain .again").count() == 2 * 3
    used = sum(box["width"] for each in bars.first.locator("i").all() if (box := each.bounding_box()))
    assert used == pytest.approx(whole * 530 / 1680, rel=0.01)
    assert bars.first.get_attribute("aria-label") == texts[0][: -len(" 530 MB")] + ": 530 MB"


def test_escapes_names_and_texts(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", HOSTILE), 3.0, HOSTILE)
    page = windows.open()
    expect(page.locator("#why")).to_have_text(HOSTILE)
    page.get_by_role("button", name=HOSTILE).click()
    expect(page.locator("tr.inside tbody tr")).to_have_count(5)
    assert page.locator("#models td.name button").all_inner_texts() == ["digits", HOSTILE]
    assert page.locator("#tenants td.name").all_inner_texts() == ["research", HOSTILE]
    assert page.locator("img, body script, iframe").count() == 0
    assert "owned" not in page.title()


def test_policy_blocks_injected_markup(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", "reader"))
    page = windows.open()
    expect(page.locator("#models button")).to_have_count(2)
    blocked = page.evaluate(
        """async () => {
            const refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            try { document.body.innerHTML = "<p>"; } catch (error) { refused.push(error.name); }
            const image = document.createElement("img");
            image.src = "http://127.0.0.2:1/x.png";
            document.body.append(image);
            await fetch("http://127.0.0.2:1/").catch(() => {});
            await new Promise((resolve) => setTimeout(resolve, 100));
            return refused;
        }"""
    )
    assert {"TypeError", "img-src", "connect-src"} <= set(blocked)
    # The browser reports each blocked script and each blocked request.
    windows.complaints.clear()
    windows.asked.clear()


def test_shows_age_of_data_without_daemon(server: PageServer, windows: Windows) -> None:
    overview = make_overview("digits", "reader")
    server.numbers = replies_with(overview)
    page = windows.open()
    expect(page.locator("#health")).to_have_class("state good")
    server.numbers = replies_with(overview, 75.0, "The daemon cannot be reached. It has stopped or is restarting.")
    expect(page.locator("#why")).to_have_text("The daemon cannot be reached. It has stopped or is restarting.")
    expect(page.locator("#since")).to_have_text(re.compile(r"The values below are 1 min 1[5-9] s old\."))
    expect(page.locator("#picture")).to_have_class("stale")
    assert (page.locator("#health").inner_text(), page.title()) == ("no response", "no response – weightd")
    assert row(page, "digits")[2] == "4 of 4"
    server.numbers = replies_with(overview)
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("#picture")).not_to_have_class("stale")


def test_shows_that_gateway_is_unreachable(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", "reader"))
    page = windows.open()
    expect(page.locator("#health")).to_have_class("state good")
    server.stop()
    expect(page.locator("#why")).to_have_text("The gateway cannot be reached.")
    expect(page.locator("#since")).to_have_text(re.compile(r"The values below are [1-9]\d* s old\."))
    # The browser itself logs this error.
    assert all("ERR_CONNECTION_REFUSED" in each for each in windows.complaints)
    windows.complaints.clear()


def test_shows_no_data_before_first_overview(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(None, 0.0, "The daemon does not respond.")
    page = windows.open()
    expect(page.locator("#why")).to_have_text("The daemon does not respond.")
    expect(page.locator("#picture")).to_be_hidden()
    assert page.locator("#since").inner_text() == ""


def test_asks_for_credentials(server: PageServer, windows: Windows) -> None:
    good = replies_with(make_overview("digits", "reader"))
    refusal = StatusReply(401, json.dumps({"error": "UNAUTHENTICATED: no known credentials"}).encode())

    def numbers(authorization: str) -> StatusReply:
        return good("") if authorization == "Bearer s3cret" else refusal

    server.numbers = numbers
    page = windows.open()
    expect(page.locator("#why")).to_have_text("UNAUTHENTICATED: no known credentials")
    page.get_by_label("Token").fill(" s3cret ")
    page.keyboard.press("Enter")
    expect(page.locator("#health")).to_have_class("state good")
    expect(page.locator("#access")).to_be_hidden()
    # The token appears in no address and lives as long as the window.
    assert page.url == server.url
    page.reload()
    expect(page.locator("#health")).to_have_class("state good")
    # The browser itself logs this error.
    assert all("401" in each for each in windows.complaints)
    windows.complaints.clear()


def test_works_with_keyboard_and_keeps_focus(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("digits", "reader"))
    page = windows.open()
    expect(page.locator("#models button")).to_have_count(2)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    button = page.get_by_role("button", name="digits")
    expect(button).to_have_attribute("aria-expanded", "true")
    inside = page.locator("tr.inside tbody tr")
    expect(inside).to_have_count(5)
    assert " ".join(inside.nth(1).inner_text().split()) == "1.w1 worker ready cpu – 1 1.50 ms 50.0 MB 10.0 MB"
    server.numbers = replies_with(make_overview("new", "digits", "reader"))
    expect(page.locator("#models button")).to_have_count(3)
    expect(button).to_be_focused()
    page.keyboard.press("Space")
    expect(inside).to_have_count(0)


def test_removed_models_leave_no_row(server: PageServer, windows: Windows) -> None:
    server.numbers = replies_with(make_overview("a", "b", "c"))
    page = windows.open()
    names = page.locator("#models td.name button")
    expect(names).to_have_text(["a", "b", "c"])
    server.numbers = replies_with(make_overview("c", "d", "a"))
    expect(names).to_have_text(["c", "d", "a"])


def test_tenant_sees_no_memory(server: PageServer, windows: Windows) -> None:
    history = History()
    history.on_metrics(looks.metrics(1.0, looks.counted("digits", processes=(), generation=0)))
    history.on_status(looks.status(1.0, pid=0))
    server.numbers = replies_with(history.overview())
    page = windows.open()
    expect(page.locator("#health")).to_have_text("running, 1 model ready")
    expect(page.locator("#memory")).to_be_hidden()
    expect(page.locator("#own")).to_be_visible()
    assert row(page, "digits") == ["digits onnxruntime", "serving", "–", "–", "0", "–", "–", "–"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_color_scheme_and_fits_small_screens(
    server: PageServer, windows: Windows, scheme: Literal["light", "dark"]
) -> None:
    server.numbers = replies_with(make_overview("digits", "m" * 64))
    page = windows.open(360, scheme)
    page.get_by_role("button", name="digits").click()
    expect(page.locator("tr.inside tbody tr")).to_have_count(5)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    ink, paper = (sum(map(int, re.findall(r"\d+", each)[:3])) for each in colours)
    assert (ink < 200 and paper > 600) if scheme == "light" else (ink > 600 and paper < 200)
