"""Generator of docs/status-page.png from invented data: `python -m tests.gateway.page.screenshot FILE`."""

from __future__ import annotations

import math
import random
import shutil
import sys
from dataclasses import replace
from typing import NamedTuple

from playwright.sync_api import sync_playwright

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview
from weightd_protocol.messages.metrics import ProcessCount
from weightd_protocol.messages.status import ModelStatus

from .conftest import replies_with
from .pageserver import PageServer


class Model(NamedTuple):
    """Invented numbers of a model: requests per second, latency buckets per thousand requests, and memory."""

    name: str
    rate: int
    buckets: tuple[int, int, int, int]
    workers: int
    private: int
    weights: int


MODELS = (
    Model("resnet50", 620, (700, 260, 36, 4), 8, 12 * MB, 102 * MB),
    Model("bert-base", 180, (0, 820, 170, 10), 4, 18 * MB, 438 * MB),
    Model("reader", 40, (0, 300, 690, 10), 2, 9 * MB, 268 * MB),
)


def make_overview() -> Overview:
    """Return an overview of one minute."""
    dice = random.Random(3)
    history = History()
    counts = {model.name: [0, 0, 0, 0] for model in MODELS}
    for second in range(70):
        for model in MODELS:
            wave = 1 + 0.25 * math.sin(second / 9 + len(model.name)) + dice.gauss(0, 0.06)
            for index, share in enumerate(model.buckets):
                counts[model.name][index] += int(model.rate * wave * share / 1000 * dice.uniform(0.7, 1.3))
        there = [
            looks.counted(model.name, counts[model.name], model.workers, queued=3 - index, running=model.workers - 1)
            for index, model in enumerate(MODELS)
        ]
        loading = (ProcessCount("worker", "attaching", 2),)
        there.append(looks.counted("translator", state="attaching", ready=False, processes=loading))
        web = looks.account("resnet50", 610 * second, {"max_rate": 2 * second}, in_flight=7, queued=5)
        research = looks.account("bert-base", 230 * second, in_flight=6, queued=1)
        tenants = [looks.tenant("web", web, weight=2, share=0.71), looks.tenant("research", research, share=0.29)]
        metrics = looks.metrics(998_430.0 + second, *there, tenants=tenants)
        history.on_metrics(replace(metrics, seconds_bounds=(0.002, 0.01, 0.05)))
    loading_status = looks.model("translator", progress="attaching 0/2")
    history.on_status(looks.status(1.0, *map(_status, MODELS), loading_status))
    return history.overview()


def _status(model: Model) -> ModelStatus:
    processes = looks.processes(model.name, model.workers, model.private, model.weights)
    forked = [replace(each, anonymous_bytes=model.private + 30 * MB) for each in processes]
    return looks.model(model.name, forked, copy=model.weights)


def main(path: str) -> None:
    with PageServer(replies_with(make_overview())) as server, sync_playwright() as playwright:
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 600}, color_scheme="light")
        page.goto(server.url)
        page.wait_for_selector("#models tbody tr")
        page.screenshot(path=path, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
