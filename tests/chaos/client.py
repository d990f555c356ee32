"""Client process of a run: it sends requests, checks and counts the answers, and writes events to stdout.

    python -m tests.chaos.client JSON

JSON has the fields of `ClientPlan`. The process exits at the end of stdin or after the planned number of requests, once
all requests have ended. Each line of stdout is a JSON object with one key: "incident", "totals" or "problems";
"problems" is written once, as the last line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack

from testkit import users
from weightd import Client, Pending, RequestError, WeightdError
from weightd import session as client_session
from weightd.channels.calls import ClientChannel
from weightd.pending import PendingCall
from weightd.protocol_core import ClientCore
from weightd.protocol_core import PreparedCall as Asking

from .ledger import OK, WRONG, Incident, RequestAccounting, SentRequest
from .material import POISONED, SampleRequest, load, poison

CONNECT_LIMIT_S = 5.0
TOTALS_EVERY_S = 1.0

# Pause after an error: like a well-behaved client, this client does not retry at once.
_PAUSE_S = 0.02

_PATIENCE_S = 30.0
_HASTY = 0.15  # of all requests
_CANCELLED = 0.05


@dataclass(frozen=True)
class ClientPlan:
    """Orders of a client process.

    `paths` are the models by name; after `visit` requests to one of them the client chooses another one; `pause_s` are
    the seconds between two requests; with `count` 0 the client never stops by itself; `poisons`: its requests crash
    workers; `uid`: its user, or 0 for the user of the parent.
    """

    address: str
    paths: dict[str, str]
    seed: str
    in_flight: int
    count: int = 0
    cancels: bool = False
    poisons: bool = False
    uid: int = 0
    visit: int = 1
    pause_s: float = 0.0


class _CountingCore(ClientCore):
    """A protocol core that records every reply on the wire, including replies that a Client drops silently."""

    ledger: RequestAccounting
    asked: SentRequest
    last = ""

    def __init__(self) -> None:
        super().__init__()
        # Ids of requests other than inference requests.
        self._others: set[str] = set()

    def prepare_infer(
        self,
        model: str,
        inputs: Any,
        timeout: float,
        outputs: Sequence[str] | None = None,
        out: Mapping[str, Any] | None = None,
        priority: int | None = None,
    ) -> Asking:
        asking = super().prepare_infer(model, inputs, timeout, outputs, out, priority)
        self.last = asking[0].id
        return asking

    def on_message(self, frames: Sequence[Any], channel: ClientChannel | None = None) -> None:
        header = msgpack.unpackb(frames[0])
        if header["type"] == "infer_response" or (header["type"] == "error" and header["id"] not in self._others):
            self.ledger.heard(header["id"], time.monotonic())
        elif header["type"] == "request_lost":
            self.ledger.lost_on_channel(header["id"])
        elif header["type"] == "channel_ended":
            self.ledger.channel_ended()
        super().on_message(frames, channel)

    def track(self, call: PendingCall, frames: list[Any]) -> list[Any]:
        frames = super().track(call, frames)
        if call.request is not None:
            self.ledger.begin(call.id, self.asked)
        return frames

    def untrack(self, call: PendingCall) -> None:
        super().untrack(call)
        self.ledger.forget(call.id)

    def _next_id(self) -> str:
        given = super()._next_id()
        self._others.add(given)
        return given

    def fail_all(self, kind: type[WeightdError], text: str, *, on_channels: bool = True) -> None:
        super().fail_all(kind, text, on_channels=on_channels)
        self.ledger.lost()


@dataclass
class _PendingRequest:
    request: str
    pending: Pending
    question: SampleRequest


class ClientLoop:
    """One client with its request accounting.

    Args:
        orders: orders of the client.
        stopping: event that ends the client.
    """

    def __init__(self, orders: ClientPlan, stopping: threading.Event) -> None:
        self.ledger = RequestAccounting(over_zmq=orders.address.startswith("ipc://"))
        self._orders = orders
        self._stopping = stopping
        self._rng = random.Random(orders.seed)
        self._questions = {name: load(Path(path)) for name, path in orders.paths.items()}
        self._model, self._visits = "", 0
        self._flights: deque[_PendingRequest] = deque()
        self._core = _CountingCore()
        self._core.ledger = self.ledger

    def run(self) -> None:
        """Send requests until stopped, then wait until every request has ended."""
        client = self._connected()
        if client is None:
            return
        reported_at = 0.0
        with client:
            while self._wanted() or self._flights:
                while self._wanted() and len(self._flights) < self._orders.in_flight:
                    self._submit(client)
                if self._flights:
                    self._settle(self._flights.popleft())
                if time.monotonic() >= reported_at + TOTALS_EVERY_S:
                    reported_at = time.monotonic()
                    self.report_totals()
            self._await_the_late(client)
        self.ledger.close()

    def _await_the_late(self, client: Client) -> None:
        """Wait for replies to abandoned requests: the daemon's deadlines start when it reads a request, thus later."""
        limit = time.monotonic() + _PATIENCE_S + CONNECT_LIMIT_S
        while self.ledger.unheard and time.monotonic() < limit:
            try:
                client.server(timeout=CONNECT_LIMIT_S)
            except RequestError:
                self.ledger.lost()
            time.sleep(_PAUSE_S)

    def _connected(self) -> Client | None:
        with mock.patch.object(client_session, "ClientCore", return_value=self._core):
            while not self._stopping.is_set():
                try:
                    return Client(self._orders.address, timeout=CONNECT_LIMIT_S)
                except RequestError:
                    time.sleep(_PAUSE_S)
        return None

    def _wanted(self) -> bool:
        done = self._orders.count and self.ledger.sent >= self._orders.count
        return not done and not self._stopping.is_set()

    def _submit(self, client: Client) -> None:
        rng = self._rng
        if self._visits % self._orders.visit == 0:
            self._model = rng.choice(list(self._questions))
        self._visits += 1
        model = self._model
        time.sleep(self._orders.pause_s)
        number = rng.randrange(len(self._questions[model]))
        timeout = rng.uniform(0.005, 1.0) if rng.random() < _HASTY else _PATIENCE_S
        question = self._questions[model][number]
        if self._orders.poisons:
            number, timeout, question = POISONED, _PATIENCE_S, SampleRequest(poison(self.ledger.sent), {})
        asked = self._core.asked = SentRequest(model, number, time.monotonic(), timeout)
        try:
            pending = client.submit(model, question.inputs, timeout=timeout)
        except RequestError as error:
            outcome = error.code, str(error), time.monotonic()
            # A part of the message may have been sent; the rest follows.
            has_begun = self.ledger.knows(self._core.last)
            _report_incident(
                self.ledger.end(self._core.last, *outcome) if has_begun else self.ledger.refused(asked, *outcome)
            )
            time.sleep(_PAUSE_S)
            return
        self._flights.append(_PendingRequest(self._core.last, pending, question))
        if self._orders.cancels and rng.random() < _CANCELLED:
            cancelled = rng.choice(self._flights)
            self.ledger.cancel(cancelled.request)
            cancelled.pending.cancel()

    def _settle(self, flight: _PendingRequest) -> None:
        text = ""
        try:
            code = OK if flight.question.answered_by(flight.pending.result()) else WRONG
        except WeightdError as error:
            code, text = error.code if isinstance(error, RequestError) else type(error).__name__, str(error)
        _report_incident(self.ledger.end(flight.request, code, text, time.monotonic()))

    def report_totals(self) -> None:
        """Write the number of requests sent and their outcomes."""
        _report(totals={"sent": self.ledger.sent, "outcomes": self.ledger.outcomes})


def _report_incident(incident: Incident | None) -> None:
    if incident is not None:
        _report(incident=dataclasses.asdict(incident))


def _report(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    """Run the client that the command line describes."""
    orders = ClientPlan(**json.loads(sys.argv[1]))
    stopping = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        stopping.set()

    threading.Thread(target=watch, daemon=True).start()
    asker = ClientLoop(orders, stopping)
    if orders.uid:
        # Drop root only now, after all files are read.
        os.setgroups([users.CLIENTS_GID])
        os.setresgid(orders.uid, orders.uid, orders.uid)
        os.setresuid(orders.uid, orders.uid, orders.uid)
    asker.run()
    asker.report_totals()
    _report(problems=asker.ledger.problems)


if __name__ == "__main__":
    main()
