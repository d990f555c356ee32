"""Device probes, with scripts in place of the Python interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.processes.device_probe import DeviceProbe
from weightd_daemon.processes.process_table import ProcessTable


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop()
    yield made
    made.close()


def probe(loop: EventLoop, probing: DeviceProbe, python: Path, *names: str) -> None:
    """Probe the devices and wait for the end."""
    over: list[None] = []
    probing.probe(str(python), names, python.with_name("log"), lambda: over.append(None))
    while not over:
        loop.run_once(30)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("""echo '{"free_bytes": 7340032, "devices": 1}'""", 7340032),
        ("""echo '{"free_bytes": 7340032}' >&2""", None),  # stderr is only logged
        ("""echo '{"error": "there is no card 0"}'; exit 69""", None),
        ("""echo '["free_bytes"]'""", None),
        ("""echo rubbish""", None),
        ("""sleep 1000 & exit 1""", None),  # the background process keeps the pipe open
        (None, None),
    ],
)
def test_probe_reports_free_memory_or_logs_why_not(
    loop: EventLoop, tmp_path: Path, script: str | None, expected: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f'#!/bin/sh\necho "$4" >>{tmp_path}/asked\n{script.replace("sleep", "timeout 3 sleep")}\n')
        python.chmod(0o700)
    devices = {name: DeviceBudget(name) for name in ("cpu", "ascend:0", "ascend:1")}
    devices["ascend:1"].capacity_bytes = 1
    probing = DeviceProbe(ProcessTable(loop), devices)
    for _ in range(2):
        probe(loop, probing, python, *devices)
    assert (devices["ascend:0"].capacity_bytes, devices["ascend:0"].reported_bytes) == (expected, expected)
    assert (devices["ascend:1"].reported_bytes, devices["cpu"].reported_bytes) == (None, None)
    # Each card is probed once, even after a failure.
    assert script is None or (tmp_path / "asked").read_text() == "ascend:0\n"
    assert expected is not None or "ascend:0: cannot query its memory: " in caplog.text
