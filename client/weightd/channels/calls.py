"""Inference requests of one client over direct channels and over the connection to the daemon. No I/O.

A request takes a channel if the channel is open and within its limits, and if the daemon has answered a request with
the same description since the channel was opened. All other requests go to the daemon, which relays them. Each call
ends once, with an answer or with an error. A request that has no answer is sent to the daemon again, but only after the
daemon has reported its loss. Without a daemon, a request whose channel has ended fails.

The caller does the I/O and reports events. A notice of the daemon says what becomes of requests whose answer does not
come. But answers that were sent before may still be in the channel's queue. Therefore `on_message` only stores a
notice, and `apply_notices` applies it after the caller has read everything that the channel had.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Union
from weakref import ReferenceType

from weightd.channels.requests import ChannelRequests
from weightd.pending import PendingCall
from weightd_protocol import limits
from weightd_protocol.messages.channels import (
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    RequestAdopted,
    RequestLost,
)

Notice = Union[RequestAdopted, RequestLost, ChannelEnded]
ChannelMessage = Union[ChannelOpened, ChannelExtended, Notice]

# The client sends no request that a worker would have to read this number of seconds before the channel expires.
_MIN_REMAINING_S = 0.05

# Requests with a description take the channel until workers have handed over this number of them, for example because
# the answers are too large for a packet.
_MAX_ADOPTIONS = 3


class ClientChannel:
    """The client's end of a direct channel, with its limits. All counts begin with the channel.

    Attributes:
        id: the id of the channel.
        model: the name of its model, as in the requests.
        end: the client's end.
        max_requests: the number of requests that the client may send.
        max_bytes: the number of bytes that the client may send.
        usable_until: the time of CLOCK_MONOTONIC in seconds until which the client may send.
        sent_requests: the number of requests that the client has sent.
        sent_bytes: the number of bytes that the client has sent.
        adoptions: the number of requests that a worker has not run, by the encoded description. Only requests with
            one of these descriptions may be sent on the channel.
        is_writable: whether the channel accepts requests. It does not after it was revoked or has ended, or after the
            client has connected again.
        is_reported: whether the daemon reports the loss of its requests: the connection on which it was opened still
            exists.
        is_read_to_end: whether the client has read its end, so that no answer follows.
    """

    __slots__ = (
        "adoptions",
        "end",
        "id",
        "is_read_to_end",
        "is_reported",
        "is_writable",
        "max_bytes",
        "max_requests",
        "model",
        "sent_bytes",
        "sent_requests",
        "usable_until",
    )

    def __init__(self, opened: ChannelOpened, model: str, end: Any) -> None:
        self.id = opened.id
        self.model = model
        self.end = end
        self.sent_requests = self.sent_bytes = 0
        self.adoptions: Dict[Optional[bytes], int] = {}
        self.is_writable = self.is_reported = True
        self.is_read_to_end = False
        self.set_limits(opened)

    def set_limits(self, message: Union[ChannelOpened, ChannelExtended]) -> None:
        """Set the limits and the expiry in a message of the daemon."""
        self.max_requests = message.max_requests
        self.max_bytes = message.max_bytes
        self.usable_until = message.expires_us / 1e6 - _MIN_REMAINING_S


class LostCalls(NamedTuple):
    """Changes by the daemon's notices.

    Attributes:
        calls: the calls to send again, to the daemon.
        ended: the channels that have ended: the caller closes their ends.
    """

    calls: List[PendingCall]
    ended: List[ClientChannel]


def _no_call() -> Optional[PendingCall]:
    return None


class ChannelCalls:
    """The calls of one client that use direct channels, and the channels.

    A call is on a channel as long as its attribute `channel` is set and it is in `tracked`.

    Args:
        tracked: weak references to the calls in progress, by request id; see `ClientCore.calls`.
        requests: decides when the client asks for channels.

    Attributes:
        tracked: as above.
        requests: as above.
        usable: the channel on which requests may be sent, by the encoded description of the request.
        channels: the channels that have not ended, by their ids.
        notices: the notices that were not applied.
    """

    def __init__(self, tracked: Dict[str, ReferenceType[PendingCall]], requests: ChannelRequests) -> None:
        self.requests = requests
        self.usable: Dict[Optional[bytes], ClientChannel] = {}
        self.channels: Dict[str, ClientChannel] = {}
        self.notices: List[Notice] = []
        self.tracked = tracked
        # The channel of each model, until the daemon reports its end or the connection is lost.
        self._by_model: Dict[str, ClientChannel] = {}
        self._has_retired = False

    # --- messages of the daemon -------------------------------------------------------------------------------------

    def on_relayed_answer(self, model: str, description: bytes) -> None:
        """The daemon has answered a request that could have been sent on a channel."""
        channel = self._by_model.get(model)
        if channel is None:
            self.requests.on_answer(model)
        elif (
            channel.is_writable
            and description not in channel.adoptions
            and len(channel.adoptions) < limits.MAX_CHANNEL_DESCRIPTIONS
        ):
            channel.adoptions[description] = 0
            self.usable[description] = channel

    def on_message(self, message: ChannelMessage) -> None:
        """Store a message about a channel, or apply it at once if it only has new limits.

        After a notice, the caller reads the channels (`noticed_channels`) and calls `apply_notices`.
        """
        if isinstance(message, ChannelOpened):
            self.requests.on_opened(message)
        elif isinstance(message, ChannelExtended):
            channel = self.channels.get(message.id)
            if channel is not None:
                channel.set_limits(message)
        else:
            if isinstance(message, RequestAdopted):
                # The answer may arrive before the notices are applied.
                self._count_adoption(message)
            self.notices.append(message)

    def add(self, message: ChannelOpened, end: Any) -> Optional[ClientChannel]:
        """Return the new channel with its end. Return None if the client cannot use it: close the end.

        The client did not ask for it, or its expiry is not plausible.
        """
        if not self.requests.is_plausible(message):
            self.requests.on_refused(message.id)
            return None
        model = self.requests.take_model(message.id)
        if model is None:
            return None
        channel = ClientChannel(message, model, end)
        self.channels[channel.id] = self._by_model[model] = channel
        return channel

    # --- sending ----------------------------------------------------------------------------------------------------

    def begin_sending(self, channel: ClientChannel, call: PendingCall, packet: bytes, now: float) -> bool:
        """Record that a request is about to be sent on a channel. Return False if its limits do not allow that."""
        nbytes = len(packet)
        sent_bytes = channel.sent_bytes + nbytes
        if (
            channel.sent_requests >= channel.max_requests
            or sent_bytes > channel.max_bytes
            or now >= channel.usable_until
            or nbytes > limits.MAX_PACKET_BYTES
        ):
            return False
        call.channel, call.packet = channel, packet
        channel.sent_requests += 1
        channel.sent_bytes = sent_bytes
        return True

    def on_not_sent(self, channel: ClientChannel, call: PendingCall) -> bool:
        """Record that the channel did not accept a request. Return whether the caller has to send it to the daemon.

        If a notice has arrived meanwhile, the request may have been sent to the daemon already.
        """
        if call.channel is not channel or call.packet is None:
            return False
        channel.sent_requests -= 1
        channel.sent_bytes -= len(call.packet)
        call.channel = call.packet = None
        return True

    def stop_sending(self, channel: ClientChannel) -> None:
        """Send no more requests on a channel. Its answers are still read."""
        channel.is_writable = False
        for description in list(channel.adoptions):
            self._stop_using(channel, description)

    # --- receiving --------------------------------------------------------------------------------------------------

    def noticed_channels(self) -> List[ClientChannel]:
        """Return the channels that the caller must read before it applies the notices."""
        ids = {each.id if isinstance(each, ChannelEnded) else each.channel for each in self.notices}
        return [channel for channel in map(self.channels.get, ids) if channel is not None]

    def apply_notices(self) -> LostCalls:
        """Apply the stored notices: everything that their channels had when they arrived has been read."""
        notices, self.notices = self.notices, []
        lost: List[PendingCall] = []
        ended: List[ClientChannel] = []
        for notice in notices:
            if isinstance(notice, ChannelEnded):
                lost += self._end(self.channels.get(notice.id), ended)
                continue
            channel = self.channels.get(notice.channel)
            call = self.tracked.get(notice.id, _no_call)()
            if channel is not None and call is not None and call.channel is channel:
                call.channel = None
                if isinstance(notice, RequestLost):
                    lost.append(call)
                else:
                    call.packet = None
        return LostCalls(lost, ended)

    def on_end(self, channel: ClientChannel) -> List[PendingCall]:
        """The caller has read a channel to its end. Return the calls that fail: their requests may have run.

        After ECONNRESET the caller first reads on: answers may lie behind it. While the daemon is connected, its notice
        says what becomes of the requests.
        """
        self.stop_sending(channel)
        channel.is_read_to_end = True
        return [] if channel.is_reported else self.abort(channel)

    def abort(self, channel: ClientChannel) -> List[PendingCall]:
        """Forget a channel on which no answer follows. Return the calls that fail."""
        self.discard(channel)
        return [each for each in self._calls_on(channel) if self.tracked.pop(each.id, None) is not None]

    def discard(self, channel: ClientChannel) -> None:
        """Forget a channel: the caller closes its end."""
        self.stop_sending(channel)
        self.channels.pop(channel.id, None)
        if self._by_model.get(channel.model) is channel:
            del self._by_model[channel.model]
            self.requests.on_end(channel.model)

    # --- the connection ---------------------------------------------------------------------------------------------

    def on_disconnected(self) -> List[PendingCall]:
        """The connection to the daemon is lost, after all its messages have been read. Requests on channels go on.

        Return the calls that fail, because their channel was read to its end and no notice follows.
        """
        self.notices.clear()
        failed: List[PendingCall] = []
        for channel in list(self.channels.values()):
            channel.is_reported = False
            if channel.is_read_to_end:
                failed += self.abort(channel)
        self._by_model.clear()
        self.requests.reset(can_ask=False)
        return failed

    def on_connected(self, *, can_open: bool) -> None:
        """The client has a new connection, whose daemon does not know the channels. Their answers are still read."""
        self.on_disconnected()
        self.requests.reset(can_ask=can_open)
        self._has_retired = bool(self.channels)
        for channel in self.channels.values():
            self.stop_sending(channel)

    def take_unused(self) -> List[ClientChannel]:
        """Forget the channels that neither send nor owe an answer, and return them: the caller closes their ends.

        Look for them only once after each connection: a channel that owes answers will end.
        """
        if not self._has_retired:
            return []
        self._has_retired = False
        idle = [
            each
            for each in self.channels.values()
            if not (each.is_writable or each.is_reported or self._calls_on(each))
        ]
        for channel in idle:
            self.discard(channel)
        return idle

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _count_adoption(self, message: RequestAdopted) -> None:
        """The daemon runs a request of a channel itself. If that is the rule, the channel saves no time."""
        channel = self.channels.get(message.channel)
        call = self.tracked.get(message.id, _no_call)()
        if channel is None or call is None or call.channel is not channel:
            return
        description = call.description_frame
        adoptions = channel.adoptions.get(description, 0) + 1
        channel.adoptions[description] = adoptions
        if adoptions >= _MAX_ADOPTIONS:
            self._stop_using(channel, description)

    def _stop_using(self, channel: ClientChannel, description: Optional[bytes]) -> None:
        if self.usable.get(description) is channel:
            self.usable.pop(description, None)

    def _end(self, channel: Optional[ClientChannel], ended: List[ClientChannel]) -> List[PendingCall]:
        """Add a channel to `ended`. Return the calls on it, which are on no channel any more."""
        if channel is None:
            return []
        ended.append(channel)
        self.discard(channel)
        calls = self._calls_on(channel)
        for call in calls:
            call.channel = None
        return calls

    def _calls_on(self, channel: ClientChannel) -> List[PendingCall]:
        calls = [reference() for reference in list(self.tracked.values())]
        return [each for each in calls if each is not None and each.channel is channel]
