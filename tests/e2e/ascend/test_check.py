"""`weightd check --load` on a simulated card, including faults that only a worker meets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ascendsim import environment
from testkit.waiting import until

from ..support import LIMIT_S, DaemonPaths, children_of
from .support import Cards, make_host, on_card

pytestmark = pytest.mark.e2e


@pytest.fixture
def cards(tmp_path: Path) -> Cards:
    return make_host(tmp_path)


@contextlib.contextmanager
def check(cards: Cards, config: Path) -> Generator[subprocess.Popen[str], None, None]:
    command = [sys.executable, "-m", "weightd_daemon", "check", "--load", str(config)]
    variables = {**os.environ, **environment(cards.host)}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def left(pid: int) -> list[Path]:
    return [path for directory in ("/tmp", "/var/tmp") for path in Path(directory).glob(f"weightd-check-{pid}-*")]


@pytest.mark.parametrize(
    ("switches", "sharing", "status", "text"),
    [
        ({}, "on", 0, "mlp on ascend:0: loaded in "),
        ({"vnpu": True}, "on", 1, " does not load on ascend:0: worker: build with the handle: "),
        ({"exports": False}, "auto", 0, " s; weights are not shared: holder: build with a list of pids: "),
    ],
)
def test_check_loads_model_on_its_card(
    cards: Cards, place: DaemonPaths, switches: dict[str, Any], sharing: str, status: int, text: str
) -> None:
    cards.host.switch(**switches)
    with check(cards, place.config({"mlp": on_card(cards.model, sharing=sharing)})) as process:
        log = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == status, log
    assert text in log
    assert cards.host.card_state().used == 0
    assert children_of(cards.directory) == set()
    assert left(process.pid) == []


def test_signal_ends_check_cleanly(cards: Cards, place: DaemonPaths) -> None:
    cards.host.fault("build", "hang", "holder")
    with check(cards, place.config({"mlp": on_card(cards.model)})) as process:
        until(lambda: cards.host.count("build"), "the holder builds")
        assert len(left(process.pid)) == 2
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in log
    assert children_of(cards.directory) == set()
    assert left(process.pid) == []
