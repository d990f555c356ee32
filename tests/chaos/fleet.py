"""Client processes of a run: their start, their end, and the events that they report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, cast

from testkit.mindir import REPOSITORY

from .client import ClientPlan
from .ledger import Incident

# Longer than the timeout of a request.
END_LIMIT_S = 60.0


class ClientProcess:
    """One client process.

    Attributes:
        name: name of its log.
        sent: number of requests in its last report.
        outcomes: number of requests by outcome in its last report.
        incidents: requests that did not end in the right answer.
    """

    def __init__(self, name: str, orders: ClientPlan, log: Path) -> None:
        self.name = name
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.incidents: list[Incident] = []
        # Mismatched counts; None until the client has ended in order, which a killed client never does.
        self._problems: list[str] | None = None
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client", json.dumps(dataclasses.asdict(orders))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=REPOSITORY,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the client by SIGKILL, with all its requests in flight."""
        self._process.kill()
        self._finish()
        self._problems = []

    def ask_to_end(self) -> None:
        """Ask the client to stop sending; it exits once every request has ended."""
        assert self._process.stdin
        self._process.stdin.close()

    def wait(self) -> list[str]:
        """Wait until the client exits, and return its mismatched counts."""
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"missing: {self.name} did not exit within {END_LIMIT_S:g} s after the request to stop"]
        self._finish()
        if self._problems is None:
            return [f"{self.name} exited with status {self._process.returncode}: {self._log.read_text()[-2000:]}"]
        return self._problems

    def _finish(self) -> None:
        self._process.wait()
        self._reader.join()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # the client was killed while it wrote the line
            report = cast("dict[str, Any]", json.loads(line))
            if "incident" in report:
                self.incidents.append(Incident(**report["incident"]))
            elif "totals" in report:
                self.sent, self.outcomes = report["totals"]["sent"], Counter(report["totals"]["outcomes"])
            else:
                self._problems = report["problems"]


class ClientProcesses:
    """All client processes of a run, including exited ones."""

    def __init__(self, workspace: Path) -> None:
        self.members: list[ClientProcess] = []
        self._workspace = workspace

    def launch(self, name: str, orders: ClientPlan) -> ClientProcess:
        """Start a client process."""
        member = ClientProcess(name, orders, self._workspace / f"client.{len(self.members)}.{name}.log")
        self.members.append(member)
        return member

    @property
    def outcomes(self) -> Counter[str]:
        """The number of requests of all clients by outcome."""
        return sum((member.outcomes for member in self.members), Counter[str]())

    def end(self) -> list[str]:
        """Ask all clients to stop, wait for them, and return their mismatched counts."""
        for member in self.members:
            if member.running:
                member.ask_to_end()
        return [problem for member in self.members for problem in member.wait()]

    def kill(self) -> None:
        """Kill all running clients."""
        for member in self.members:
            if member.running:
                member.kill()
