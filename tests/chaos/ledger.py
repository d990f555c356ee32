"""Request counts of one client. Every request must end exactly once, with one reply on the wire."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

OK = "OK"
WRONG = "WRONG"

# Ended requests for which a second answer is still recognized as a duplicate; a later one is reported as unasked.
_REMEMBERED = 100_000


@dataclass(frozen=True)
class SentRequest:
    """A request: model and number of its sample, time of sending (monotonic seconds), and timeout."""

    model: str
    question: int
    at: float
    timeout: float


@dataclass(frozen=True)
class Incident:
    """A request that did not end in the right answer. Times are monotonic seconds of this machine.

    `over_zmq`: the client uses ZeroMQ.
    """

    model: str
    question: int
    code: str
    text: str
    sent_at: float
    ended_at: float
    timeout: float
    cancelled: bool = False
    over_zmq: bool = False


@dataclass
class _RequestRecord:
    asked: SentRequest
    answers: int = 0
    heard_at: float | None = None
    cancelled: bool = False
    given_up: bool = False
    may_be_lost: bool = False


class RequestAccounting:
    """Request counts of a client; mismatches are problems.

    Args:
        over_zmq: whether the client uses ZeroMQ.

    Attributes:
        sent: number of requests that were sent, or could not be sent.
        outcomes: number of requests by outcome.
        problems: duplicate, missing and unexpected answers, as texts.
    """

    def __init__(self, *, over_zmq: bool = False) -> None:
        self.sent = 0
        self._over_zmq = over_zmq
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._open: dict[str, _RequestRecord] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    @property
    def unheard(self) -> int:
        """The number of requests without an answer on the wire."""
        return sum(not (each.given_up and each.may_be_lost) for each in self._open.values())

    def begin(self, request: str, asked: SentRequest) -> None:
        """Record that a request is being sent."""
        self.sent += 1
        self._open[request] = _RequestRecord(asked)

    def forget(self, request: str) -> None:
        """Record that a request was not sent after all."""
        if self._open.pop(request, None) is not None:
            self.sent -= 1

    def knows(self, request: str) -> bool:
        """Return whether a request was sent and has not ended."""
        return request in self._open

    def cancel(self, request: str) -> None:
        """Record that the client has cancelled a request."""
        self._open[request].cancelled = True

    def heard(self, request: str, now: float) -> None:
        """Record an answer on the wire."""
        entry = self._open.get(request)
        if entry is not None:
            entry.answers += 1
            entry.heard_at = now
            if entry.answers > 1:
                self.problems.append(f"duplicate: {entry.answers} answers for {request}, {entry.asked}")
            elif entry.given_up:
                self._close(request, entry)  # a late answer
        elif request in self._ended:
            self._ended[request] += 1
            self.problems.append(f"duplicate: {self._ended[request]} answers for {request}, which had ended")
        else:
            self.problems.append(f"unasked: an answer for {request}, which was never sent")

    def lost_on_channel(self, request: str) -> None:
        """Record that the daemon has reported a request lost: if the client gave it up, an answer need not follow."""
        entry = self._open.get(request)
        if entry is not None:
            entry.may_be_lost = True

    def channel_ended(self) -> None:
        """Record the end of a direct channel: no answer need follow to the requests that the client gave up."""
        for entry in self._open.values():
            entry.may_be_lost = entry.may_be_lost or entry.given_up

    def lost(self) -> None:
        """Record that the connection was lost: requests that the client gave up will get no answer."""
        for request, entry in list(self._open.items()):
            if entry.given_up:
                self._close(request, entry)

    def end(self, request: str, code: str, text: str, now: float) -> Incident | None:
        """Record that the client sees the request end in OK, WRONG or an error code; return an incident to judge.

        Returns None for a right answer.
        """
        entry = self._open.get(request)
        if entry is None or entry.given_up:
            self.problems.append(f"duplicate: {request} ended again, in {code}")
            return None
        self.outcomes[code] += 1
        if entry.answers == 0 and (code == "DEADLINE_EXCEEDED" or (code == "CANCELLED" and entry.cancelled)):
            # The client itself has ended the request. The answer must still arrive.
            entry.given_up = True
        else:
            if entry.answers == 0 and code != "UNAVAILABLE":  # UNAVAILABLE means that the connection was lost
                self.problems.append(f"missing: {request} ended in {code} without an answer on the wire")
            self._close(request, entry)
        if code == OK:
            return None
        return self._incident(entry.asked, code, text, entry.heard_at or now, cancelled=entry.cancelled)

    def refused(self, asked: SentRequest, code: str, text: str, now: float) -> Incident:
        """Record a request that could not be sent; return the incident."""
        self.sent += 1
        self.outcomes[code] += 1
        return self._incident(asked, code, text, now)

    def close(self) -> None:
        """Report requests without an answer; no answer can arrive any more."""
        for request, entry in self._open.items():
            if not (entry.given_up and entry.may_be_lost):
                self.problems.append(f"missing: no answer for {request}, {entry.asked}")
        ended = sum(self.outcomes.values())
        if self.sent != ended:
            self.problems.append(f"missing: {self.sent} requests were sent, {ended} ended")

    def _incident(self, asked: SentRequest, code: str, text: str, ended: float, *, cancelled: bool = False) -> Incident:
        return Incident(
            asked.model, asked.question, code, text, asked.at, ended, asked.timeout, cancelled, self._over_zmq
        )

    def _close(self, request: str, entry: _RequestRecord) -> None:
        del self._open[request]
        self._ended[request] = entry.answers
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
