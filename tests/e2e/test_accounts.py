"""Accounting of tenants: counted, shown by status, logged, and continued after a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from testkit.waiting import until
from weightd import Client
from weightd_protocol.messages.accounts import AccountStatus

from .support import ONE_ENGINE, BareEngine, DaemonPaths, Weightd, ask_all, mlp_inputs

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

TABLES = f'\n[tenants.research]\nuids = [{os.getuid()}]\nmay = ["infer", "status"]\nweight = 2\n'


def accounts(client: Client) -> Mapping[str, AccountStatus]:
    """Return the accounts of the tenant "research" by model."""
    tenant = next(each for each in client.status().tenants if each.name == "research")
    return {each.model: each for each in tenant.accounts}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
def test_accounts_survive_restart(mlp: Path, bare: BareEngine, place: DaemonPaths, tmp_path: Path, number: int) -> None:
    config = place.config({"mlp": {"path": mlp}}, accounting_interval=1)
    with config.open("a", encoding="utf-8") as file:
        file.write(TABLES)
    questions = bare.questions(mlp, mlp_inputs((1, 2)))
    with Weightd(tmp_path / "one.log", "serve", config) as daemon, daemon.client(place.address) as client:
        # Wait for the model, so that requests and answers fall into the same accounting interval.
        daemon.wait_for("mlp.1: serving")
        ask_all(client, "mlp", questions)
        before = accounts(client)["mlp"]
        assert (before.served, before.in_flight, dict(before.failed)) == (2, 0, {})
        assert before.slot_seconds > 0
        assert before.bytes_in == sum(each.nbytes for question in questions for each in question.inputs.values())
        daemon.wait_for("tenant research: 2 requests in 1 s, 2 served, none refused, ")
        if number == signal.SIGKILL:
            until(lambda: [*place.cache.glob("*.counters")], "the accounts are written", limit=90)
        daemon.end(number)
    with Weightd(tmp_path / "two.log", "serve", config) as daemon, daemon.client(place.address) as client:
        assert accounts(client)["mlp"] == before
        ask_all(client, "mlp", questions)
        assert accounts(client)["mlp"].served == 4
        command = [sys.executable, "-m", "weightctl", "--socket", place.address, "status"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        assert "research: weight 2; 100% of the seconds of the last minute\n" in shown
        printed = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False).stdout
        assert [each["name"] for each in json.loads(printed)["tenants"]] == ["research", "(operators)"]
        assert daemon.end() == 0
    assert [each.suffix for each in place.cache.iterdir()] == [".counters"]
    assert place.left == []
