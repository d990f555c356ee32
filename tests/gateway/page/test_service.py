"""Tests of the status page of a real daemon, through a gateway, in a browser."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from testkit import models
from testkit.httpgateway import HttpGateway
from testkit.service import Service
from weightd_common.dashboard.memory import service_memory

from .conftest import LIMIT_MS, Windows

pytestmark = pytest.mark.e2e

# At this width the weights are large enough to be shared.
WIDTH = 768


def test_page_shows_data_of_daemon(browser: Browser, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "mlp.onnx", layers=4, width=WIDTH)
    with Service({"mlp": {"path": path, "workers": 2}}) as service, HttpGateway(service.address) as gateway:
        service.ready()
        windows = Windows(browser, f"http://127.0.0.1:{gateway.port}/")
        page = windows.open()
        expect(page.locator("#health")).to_have_text("running, 1 model ready", timeout=LIMIT_MS)
        cells = page.locator("#models tbody tr:first-child > td")
        with service.client() as client:

            def asked(text: str) -> bool:
                client.infer("mlp", {"x": np.zeros((1, WIDTH), np.float32)})
                return text not in ("–", "0.0")

            while not asked(cells.nth(3).inner_text()):
                pass
        expect(cells.nth(2)).to_have_text("2 of 2")
        memory = service_memory(service.status())
        assert memory is not None
        for kind, bytes_ in (("with", memory.total_bytes), ("plain", memory.without_sharing_bytes)):
            [number] = re.findall(r"([\d.]+) MB", page.locator(f"#bars .{kind} strong").inner_text())
            # The two measurements are a moment apart.
            assert float(number) == pytest.approx(bytes_ / 1e6, rel=0.2)
        copies, plain = (
            sum(box["width"] for each in page.locator(f"#bars {bar}").all() if (box := each.bounding_box()))
            for bar in (".with .copy", ".plain .bar i")
        )
        assert copies / plain == pytest.approx(memory.copy_bytes / memory.without_sharing_bytes, rel=0.2)
        worker = next(each for each in service.processes() if each.role == "worker")
        os.kill(worker.pid, signal.SIGKILL)
        page.get_by_role("button", name="mlp").click()
        expect(page.locator("tr.inside")).to_contain_text("w3", timeout=LIMIT_MS)
        service.stop()
        expect(page.locator("#why")).to_have_text(re.compile("^The daemon "), timeout=LIMIT_MS)
        expect(page.locator("#picture")).to_have_class("stale")
        windows.close()
        assert windows.complaints == []
        assert all(each.startswith(("data:", f"http://127.0.0.1:{gateway.port}/")) for each in windows.asked)
