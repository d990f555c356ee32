"""Tests of a replica's daemon, started through the daemon supervisor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from weightd_ray import daemon, daemon_supervisor
from weightd_ray.daemon import EmbeddedDaemon

# Detaches as the supervisor does, and ignores the closed pipe.
_STOPPED = """
import json, os, sys, time
sys.stdin.readline()
if os.fork():
    os._exit(0)
print(json.dumps({"address": "unix:///x", "pid": os.getpid()}), flush=True)
time.sleep(60)
"""


def test_kills_supervisor_that_does_not_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_supervisor, "supervisor_command", lambda _: [sys.executable, "-I", "-S", "-c", _STOPPED])
    monkeypatch.setattr(daemon, "_STOP_TIMEOUT_S", 0.01)

    async def start_and_stop() -> None:
        own = EmbeddedDaemon(tmp_path, {}, lambda: None)
        assert await own.start() == "unix:///x"
        await own.stop()
        # The supervisor's end of the report pipe is closed by then.
        while not own.failure:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(start_and_stop(), 30))
