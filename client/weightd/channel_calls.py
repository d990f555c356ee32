"""Inference requests of one client to one model, over a direct channel and over the connection to the daemon. No I/O.

A request takes the channel if the channel is open and has credits; otherwise the daemon relays it. Each call ends once:
with one answer, or with one error that says whether the request may have run. A request that may have run is never sent
again. A request that the daemon reports as not run is sent again, once, through the daemon.

The caller does the I/O and reports events. A notice of the daemon says what becomes of requests whose answer does not
come. But answers that were sent before may still be in the channel's queue. Therefore `on_notice` only stores a notice,
and `on_channel_read` applies it after the caller has read everything that the channel had.
"""

from __future__ import annotations

import enum
from typing import Dict, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from weightd_common.channels.messages import Adopted, Ended, Granted, Lost, Notice, Refilled

# The client sends no request that a worker would have to read this number of seconds before the channel expires.
_MIN_REMAINING_S = 0.05


class CallState(enum.Enum):
    """The state of a call."""

    QUEUED = "queued"  # sent on the channel: a worker answers it, or the daemon reports what became of it
    RELAYED = "relayed"  # the daemon has it, and answers it exactly once
    ANSWERED = "answered"  # ended with an answer, which may be an error of the model
    FAILED = "failed"  # ended with an error of this client


class CallEvent(enum.Enum):
    """An event that changes the state of a call."""

    ANSWER = "answer"  # an answer has arrived, over the channel or from the daemon
    ADOPT = "adopt"  # the daemon has received the request from a worker, or from the channel's queue
    NOT_RUN = "not run"  # the daemon reports that the request has not run: this client sends it to the daemon
    LOSE = "lose"  # no answer follows, and the request may have run
    TIME_OUT = "time out"  # the call's deadline has passed


CALL_TRANSITIONS: Mapping[Tuple[CallState, CallEvent], CallState] = {
    (CallState.QUEUED, CallEvent.ANSWER): CallState.ANSWERED,
    (CallState.QUEUED, CallEvent.ADOPT): CallState.RELAYED,
    (CallState.QUEUED, CallEvent.NOT_RUN): CallState.RELAYED,
    (CallState.QUEUED, CallEvent.LOSE): CallState.FAILED,
    (CallState.QUEUED, CallEvent.TIME_OUT): CallState.FAILED,
    (CallState.RELAYED, CallEvent.ANSWER): CallState.ANSWERED,
    (CallState.RELAYED, CallEvent.LOSE): CallState.FAILED,
    (CallState.RELAYED, CallEvent.TIME_OUT): CallState.FAILED,
}

PENDING = frozenset({CallState.QUEUED, CallState.RELAYED})


class SendToDaemon(NamedTuple):
    """Send the request to the daemon, which relays it. It has not run."""

    request: int


class Fail(NamedTuple):
    """End the call with an error. The request may have run."""

    request: int


Action = Union[SendToDaemon, Fail]


class ClientChannel:
    """The client's end of a channel, with its limits. All counts begin with the channel.

    Attributes:
        serial: the channel's serial.
        request_limit: the number of requests that the client may send.
        byte_limit: the number of bytes that the client may send.
        expires_at: the time of CLOCK_MONOTONIC at which workers stop reading, in seconds.
        sent_requests: the number of requests that the client has sent.
        sent_bytes: the number of bytes that the client has sent.
        is_writable: whether the channel has accepted every message so far.
    """

    __slots__ = ("byte_limit", "expires_at", "is_writable", "request_limit", "sent_bytes", "sent_requests", "serial")

    def __init__(self, granted: Granted) -> None:
        self.serial, self.request_limit, self.byte_limit, self.expires_at = granted
        self.sent_requests = 0
        self.sent_bytes = 0
        self.is_writable = True

    def accepts(self, nbytes: int, now: float) -> bool:
        """Return whether the client may send a request of `nbytes` bytes now."""
        return (
            self.is_writable
            and self.sent_requests < self.request_limit
            and self.sent_bytes + nbytes <= self.byte_limit
            and now + _MIN_REMAINING_S < self.expires_at
        )


class ChannelCalls:
    """The calls of one client to one model.

    Attributes:
        states: the state of each pending call, by its number.
        channel: the channel that the daemon has granted last; None if it has ended.
    """

    def __init__(self) -> None:
        self.states: Dict[int, CallState] = {}
        self.channel: Optional[ClientChannel] = None
        # The channel on which each QUEUED call was sent. After a channel is revoked, the client may have another.
        self._sent_on: Dict[int, int] = {}
        self._notices: List[Notice] = []
        # The channels of the present connection that have not ended: the daemon reports what becomes of their requests.
        self._reported: Set[int] = set()
        # Of these, the channels that the caller has read to the end before the daemon's notice arrived.
        self._read_to_end: Set[int] = set()

    # --- sending ----------------------------------------------------------------------------------------------------

    def usable_channel(self, nbytes: int, now: float) -> Optional[ClientChannel]:
        """Return the channel on which to send a request of `nbytes` bytes; None to send it to the daemon.

        If sending fails with EAGAIN, the caller sends the request to the daemon. It does the same after EPIPE or
        ECONNRESET, and calls `on_unwritable` first. In all three cases the request has not run.
        """
        channel = self.channel
        return channel if channel is not None and channel.accepts(nbytes, now) else None

    def on_sent(self, channel: ClientChannel, request: int, nbytes: int) -> None:
        """Record that a request was sent on a channel."""
        channel.sent_requests += 1
        channel.sent_bytes += nbytes
        self.states[request] = CallState.QUEUED
        self._sent_on[request] = channel.serial

    def on_unwritable(self, channel: ClientChannel) -> None:
        """Record that a channel was revoked, so that it accepts no more messages."""
        channel.is_writable = False

    def on_sent_to_daemon(self, request: int) -> None:
        """Record that a new request was sent to the daemon."""
        self.states[request] = CallState.RELAYED

    # --- receiving --------------------------------------------------------------------------------------------------

    def on_answer(self, request: int, *, is_from_daemon: bool) -> bool:
        """Return whether an answer ends a call. Drop any other answer: the call has ended, or belongs to the daemon."""
        state = self.states.get(request)
        if state is None or (state is CallState.RELAYED and not is_from_daemon):
            return False
        self._advance(request, CallEvent.ANSWER)
        return True

    def on_notice(self, notice: Notice) -> None:
        """Store a notice of the daemon. Then the caller reads the channel and calls `on_channel_read`."""
        if isinstance(notice, Granted):
            self.channel = ClientChannel(notice)
            self._reported.add(notice.channel)
        elif isinstance(notice, Refilled):
            channel = self.channel
            if channel is not None and channel.serial == notice.channel:
                _, channel.request_limit, channel.byte_limit, channel.expires_at = notice
        else:
            self._notices.append(notice)

    def on_channel_read(self) -> List[Action]:
        """Apply the stored notices: everything that the channel had when they arrived has been read."""
        notices, self._notices = self._notices, []
        actions: List[Action] = []
        for notice in notices:
            if isinstance(notice, Adopted):
                if self._is_queued(notice.request, notice.channel):
                    self._advance(notice.request, CallEvent.ADOPT)
            elif isinstance(notice, Lost):
                if self._is_queued(notice.request, notice.channel):
                    actions.append(self._give_up(notice.request, notice.may_have_run))
            elif isinstance(notice, Ended):
                self._reported.discard(notice.channel)
                self._read_to_end.discard(notice.channel)
                actions += self._give_up_all(notice.channel, notice.may_have_run)
        return actions

    def on_channel_end(self, serial: int) -> List[Action]:
        """The caller has read a channel to its end.

        After ECONNRESET the caller first reads on: answers may lie behind it. While the daemon is connected, its notice
        says what became of the requests. Without it, they may have run.
        """
        self._drop_channel(serial)
        if serial not in self._reported:
            return self._give_up_all(serial, may_have_run=True)
        self._read_to_end.add(serial)
        return []

    def on_daemon_lost(self) -> List[Action]:
        """The connection to the daemon is lost, after all its messages have been read. Requests on channels go on."""
        actions: List[Action] = []
        for request in [each for each, state in self.states.items() if state is CallState.RELAYED]:
            self._advance(request, CallEvent.LOSE)
            actions.append(Fail(request))
        for serial in self._read_to_end:
            actions += self._give_up_all(serial, may_have_run=True)
        self._reported.clear()
        self._read_to_end.clear()
        return actions

    def on_timeout(self, request: int) -> List[Action]:
        """The deadline of a call has passed. Its request may have run, and its answer is dropped."""
        if request not in self.states:
            return []
        self._advance(request, CallEvent.TIME_OUT)
        return [Fail(request)]

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _advance(self, request: int, event: CallEvent) -> None:
        state = CALL_TRANSITIONS[self.states[request], event]
        if state is not CallState.QUEUED:
            self._sent_on.pop(request, None)
        if state in PENDING:
            self.states[request] = state
        else:
            del self.states[request]

    def _is_queued(self, request: int, serial: int) -> bool:
        return self._sent_on.get(request) == serial

    def _give_up(self, request: int, may_have_run: bool) -> Action:
        """Process that no answer to a queued call follows."""
        self._advance(request, CallEvent.LOSE if may_have_run else CallEvent.NOT_RUN)
        return Fail(request) if may_have_run else SendToDaemon(request)

    def _give_up_all(self, serial: int, may_have_run: bool) -> List[Action]:
        self._drop_channel(serial)
        requests = [each for each, sent_on in self._sent_on.items() if sent_on == serial]
        return [self._give_up(each, may_have_run) for each in requests]

    def _drop_channel(self, serial: int) -> None:
        if self.channel is not None and self.channel.serial == serial:
            self.channel = None
