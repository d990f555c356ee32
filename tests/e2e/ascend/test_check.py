"""`weightd check --load` on a simulated card: what a worker cannot do is found as well."""

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

from ..support import LIMIT_S, Place, children_of
from .support import Cards, on_card

pytestmark = pytest.mark.e2e


@contextlib.contextmanager
def check(cards: Cards, config: Path) -> Generator[subprocess.Popen[str], None, None]:
    command = [sys.executable, "-m", "weightd.daemon", "check", "--load", str(config)]
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
    ("switches", "keys", "status", "text"),
    [
        ({}, {"sharing": "on"}, 0, "mlp on ascend:0: loaded in "),
        ({}, {"sharing": "off"}, 0, "nothing shared; sharing is off"),
        ({"noise": 1e-4}, {"sharing": "on", "canary_tolerance": 1e-3}, 0, "mlp on ascend:0: loaded in "),
        (
            {"vnpu": True},
            {"sharing": "on"},
            1,
            " does not load on ascend:0: worker: build with the handle: ",
        ),
        ({"exports": False}, {"sharing": "auto"}, 0, " s; weights are not shared: holder: build with a list of pids: "),
    ],
)
def test_a_model_is_loaded_on_its_card(
    cards: Cards, place: Place, switches: dict[str, Any], keys: dict[str, Any], status: int, text: str
) -> None:
    cards.host.switch(**switches)
    with check(cards, place.config({"mlp": {**on_card(cards.model), **keys}})) as process:
        log = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == status, log
    assert text in log
    assert cards.host.ledger().used == 0
    assert children_of(cards.directory) == set()
    assert left(process.pid) == []


def test_a_model_without_a_canary_is_not_served_on_a_card(cards: Cards, place: Place) -> None:
    cards.host.fault("predict", "garbage", "holder", times=1)
    with check(cards, place.config({"mlp": on_card(cards.model)})) as process:
        log = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1, log
    assert "no canary: the model gives different answers to the same input" in log
    assert "name an input with the key canary, or set sharing to off" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(cards: Cards, place: Place, number: signal.Signals) -> None:
    cards.host.fault("build", "hang", "holder")
    with check(cards, place.config({"mlp": on_card(cards.model)})) as process:
        until(lambda: cards.host.count("build"), "the holder builds")
        assert len(left(process.pid)) == 2
        process.send_signal(number)
        log = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 128 + number
    assert "Traceback" not in log
    assert children_of(cards.directory) == set()
    assert left(process.pid) == []
