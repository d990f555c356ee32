"""Reads requests from direct channels, runs them, and sends the answers. Does the I/O of `ChannelSession`.

Requests that this worker must not run are handed over to the daemon, which processes them as if the client had sent
them on its connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
from time import monotonic
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union, cast

from weightd_common.channels import messages
from weightd_common.channels.messages import Released
from weightd_common.channels.pages import ANSWERED, DEVICE_LAYOUT, FAILED, INVALID, LATE, RETURNED
from weightd_common.stream import ANCILLARY_BYTES, descriptors_in, refuses_descriptors
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.description_cache import DescriptionCache
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument, Unavailable
from weightd_protocol.messages.channels import (
    OVERDRAWN,
    AddChannel,
    AllowRequests,
    AnswerDropped,
    ChannelReleased,
    ReleaseChannel,
    RequestHandedOver,
    SetChannelRows,
    WatchWeights,
)
from weightd_protocol.messages.worker import Predict, PredictResult
from weightd_worker import exit_codes
from weightd_worker.channels.answers import AnswerWriter
from weightd_worker.channels.mapped_pages import MappedPages
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.requests import RequestReader, new_decoder
from weightd_worker.channels.session import ChannelSession
from weightd_worker.channels.weight_guard import WeightGuard
from weightd_worker.connection import Connection

ChannelOrder = Union[WatchWeights, SetChannelRows, AddChannel, AllowRequests, ReleaseChannel]
CHANNEL_ORDERS = (WatchWeights, SetChannelRows, AddChannel, AllowRequests, ReleaseChannel)

RunRequest = Callable[[Predict, Sequence[Any], Callable[..., None]], int]
"""A function that runs a request with its tensors and passes the reply to a function.

It returns OK, or the exit status if the process must exit.
"""

# A packet that is longer than the largest legal one is cut by one byte more than the limit, so it is recognized.
_READ_BYTES = limits.MAX_PACKET_BYTES + 1
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# Errors of a send that found no space. Every other error says that the client has closed its end.
_NO_SPACE = frozenset([errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM])

# Result of `_send` for an answer that is too large for a packet.
_UNSENDABLE = -1

_LATE = DeadlineExceeded("was waiting on its direct channel at its deadline")
_NO_DAEMON = "the daemon is restarting"
_BUSY_DAEMON = "the daemon does not read the messages of its workers"


_log = logging.getLogger("weightd.worker")


class WorkerChannel:
    """The workers' end of a direct channel.

    Args:
        session: the session to which the channel belongs.
        pulled: the channel in the session.
        end: the workers' end, which this object owns.
        reader: reads the requests.
    """

    __slots__ = ("pulled", "reader", "receive", "receive_with_descriptors", "send", "session", "socket")

    def __init__(
        self, session: ChannelSession, pulled: PulledChannel, end: socket.socket, reader: RequestReader
    ) -> None:
        self.session = session
        self.pulled = pulled
        self.socket = end
        self.reader = reader
        # The bound methods are stored, because looking them up for each request would take time.
        self.receive, self.send = end.recv, end.send
        self.receive_with_descriptors = None if refuses_descriptors(end) else end.recvmsg


class DirectChannels:
    """The direct channels of a worker.

    Args:
        connection: the connection to the daemon, which also waits for requests on the channels.
        run_request: runs a request.
        descriptions: the descriptions that this worker has decoded.

    Attributes:
        failure: why the process must exit; "" if it need not, or if only the exit status of `serve` says so.
    """

    def __init__(self, connection: Connection, run_request: RunRequest, descriptions: DescriptionCache) -> None:
        self._connection = connection
        self._run_request = run_request
        self._decoder = new_decoder(descriptions)
        self._writer = AnswerWriter()
        # The session with the present daemon's channels; None until the daemon has sent its pages. Sessions with
        # channels of earlier daemons, which this worker reads to their ends.
        self._session: Optional[ChannelSession] = None
        self._retired: List[ChannelSession] = []
        self._pages: MappedPages = cast(Any, None)
        self._by_serial: Dict[int, WorkerChannel] = {}
        self._by_fd: Dict[int, WorkerChannel] = {}
        # The request that is running: its channel, its id, its packet and the time at which it has started.
        self._running: Tuple[WorkerChannel, str, bytes] = cast(Any, None)
        self._started_at = 0.0
        # Checks the shared weights before each answer; None if they cannot become invalid.
        self._guard: Optional[WeightGuard] = None
        self._is_closed = False
        self.failure = ""

    # --- orders -------------------------------------------------------------------------------------------------------

    def on_order(self, order: ChannelOrder) -> None:
        """Execute an order of the daemon. Call this between two requests, in the order of arrival."""
        if isinstance(order, AddChannel):
            self._add(order)
        elif isinstance(order, AllowRequests):
            self._allow(order)
        elif isinstance(order, ReleaseChannel):
            self._release(order)
        elif isinstance(order, WatchWeights):
            self._watch_weights(order)
        elif not self._is_closed:
            self._set_rows(order)

    def _set_rows(self, order: SetChannelRows) -> None:
        """Map the pages of the device, whose descriptor comes with the daemon's first order. Set the rows."""
        if self._session is None:
            descriptor = self._connection.take_descriptor()
            try:
                self._pages = pages = MappedPages(descriptor, order.row)
            finally:
                os.close(descriptor)
            scheduler = PullScheduler(pages.daemon_page, (), pages.own, ())
            self._session = ChannelSession(DEVICE_LAYOUT, pages.daemon_page, pages.own, scheduler, order.generation)
        rows = self._pages.rows(order.rows)
        self._session.set_rows(rows, [rows[each] for each in order.peers], self._pages.table(order.rows))

    def _watch_weights(self, order: WatchWeights) -> None:
        """Check the weights from now on. The next daemon sends the order again."""
        if self._guard is not None:
            self._guard.close()
        holder = self._connection.take_descriptor() if order.has_holder else None
        store = self._connection.take_descriptor() if order.store else None
        self._guard = WeightGuard(holder, store, order.store)

    def _add(self, order: AddChannel) -> None:
        """Begin to read a channel."""
        descriptor = self._connection.take_descriptor()
        session = self._session
        if session is None:
            os.close(descriptor)
            return
        released = session.add(messages.AddChannel(order.slot, order.channel))
        if released:
            os.close(descriptor)
            self._connection.reply(_encode(ChannelReleased(order.channel, released[0].reason)))
            return
        end, reader = socket.socket(fileno=descriptor), RequestReader(self._decoder)
        channel = WorkerChannel(session, session.channels[order.channel], end, reader)
        self._by_serial[order.channel] = self._by_fd[descriptor] = channel
        self._connection.watch(descriptor)

    def _allow(self, order: AllowRequests) -> None:
        """Run the requests with a description from now on. The channel may have been released already."""
        channel = self._by_serial.get(order.channel)
        if channel is not None:
            channel.reader.allow(order.digest)

    def _release(self, order: ReleaseChannel) -> None:
        """Close a channel. The worker may have released it already."""
        if self._session is not None:
            self._on_released(self._session.release(order.channel))

    def on_new_daemon(self) -> None:
        """Let the clients of all channels send nothing more. The queued requests are answered as before."""
        self._shut_down()
        if self._session is not None:
            self._retired.append(self._session)
            self._session = None

    def drain(self) -> int:
        """Answer all queued requests and close all channels. Return OK, or the exit status of a failure."""
        self._shut_down()
        # Every channel stays readable until its end has been read.
        while self._by_fd:
            status = self.serve([*self._by_fd])
            if status != exit_codes.OK:
                return status
        return exit_codes.OK

    def close(self) -> None:
        """Close all channels without a report. The process exits, so the daemon takes care of their requests."""
        for channel in self._by_fd.values():
            self._connection.unwatch(channel.socket.fileno())
            channel.socket.close()
        self._by_fd.clear()
        self._by_serial.clear()
        self._session = None
        self._is_closed = True

    def _shut_down(self) -> None:
        for channel in self._by_fd.values():
            channel.socket.shutdown(socket.SHUT_RD)

    # --- requests -----------------------------------------------------------------------------------------------------

    def serve(self, ready: Sequence[int]) -> int:
        """Read and process one request. Return OK, or the exit status if the process must exit.

        Args:
            ready: the descriptors of the readable channels. One that was closed meanwhile is ignored.
        """
        now = monotonic()
        by_fd = self._by_fd
        readable = [by_fd[each].pulled for each in ready if each in by_fd]
        session = self._session
        if self._retired:
            session, readable = self._of_one_session(readable)
        if session is None:
            return exit_codes.OK
        pulled = session.choose(readable, now)
        released = session.take_releases()
        if released:
            self._on_released(released)
        if pulled is None:
            return exit_codes.OK
        channel = self._by_serial[pulled.serial]
        try:
            if channel.receive_with_descriptors is None:
                packet, ancillary = channel.receive(_READ_BYTES, _RECEIVE_FLAGS), None
            else:
                packet, ancillary, _, _ = channel.receive_with_descriptors(_READ_BYTES, ANCILLARY_BYTES, _RECEIVE_FLAGS)
        except OSError:
            # Another worker was quicker, or the client has closed its end. In the latter case, this error is reported
            # once, and the queued requests can be read.
            session.on_nothing(pulled)
        else:
            if ancillary:
                self._refuse_descriptors(channel, packet, ancillary, now)
            elif packet:
                return self._process(channel, packet, now)
            else:
                self._on_released(session.on_end(pulled))
        return exit_codes.OK

    def _process(self, channel: WorkerChannel, packet: bytes, now: float) -> int:
        """Run a request, or refuse it. Return OK, or the exit status if the process must exit."""
        session, pulled = channel.session, channel.pulled
        deadline_us, request_id, number, description, tensors = channel.reader.read(packet)
        refusal = session.on_request(pulled, number, len(packet), now)
        if refusal or description is None:
            self._hand_over(channel, request_id, number, packet, refusal)
        elif deadline_us <= now * 1e6:
            session.on_answered(pulled, self._send(channel, self._writer.refusal(request_id, _LATE), LATE))
        else:
            session.run(now)
            self._running = channel, request_id, packet
            self._started_at = monotonic()
            status = self._run_request(Predict(number, description), tensors, self._on_reply)
            return exit_codes.MODEL_CORRUPTED if self.failure else status
        return exit_codes.OK

    def _of_one_session(self, readable: List[PulledChannel]) -> Tuple[Optional[ChannelSession], List[PulledChannel]]:
        """Return the readable channels of the oldest session that has any."""
        self._retired = [each for each in self._retired if each.channels]
        for session in self._retired:
            found = [each for each in readable if session.channels.get(each.serial) is each]
            if found:
                return session, found
        return self._session, readable

    def _on_reply(self, reply: Tuple[object, Sequence[Any]]) -> None:
        """Send the reply to the running request to the client."""
        seconds = monotonic() - self._started_at
        channel, request_id, _ = self._running
        session, pulled = channel.session, channel.pulled
        if self._guard is not None and not self._guard.are_weights_valid():
            # The reply may be wrong. The row of the exiting process shows the request, so the client sends it again.
            self.failure = "the shared weights have become invalid during a request on a direct channel"
            return
        session.on_result(pulled, seconds)
        message: Any = reply[0]
        if message.__class__ is PredictResult:
            answer = self._writer.result(request_id, message.description, reply[1])
            outcome = self._send(channel, answer, ANSWERED) if answer else _UNSENDABLE
            if outcome == ANSWERED:
                session.on_answered(pulled, ANSWERED, len(answer))
                return
            session.on_answered(pulled, self._on_too_large() if outcome == _UNSENDABLE else RETURNED)
            return
        outcome = INVALID if message.code == InvalidArgument.code else FAILED
        outcome = self._send(channel, self._writer.error(request_id, message.code, message.error), outcome)
        # The row of a process that exits shows the request that was the cause.
        if not message.is_exiting:
            session.on_answered(pulled, outcome)

    def _send(self, channel: WorkerChannel, answer: bytes, outcome: int) -> int:
        """Send an answer without waiting.

        Return `outcome`; RETURNED if the answer was dropped; `_UNSENDABLE` if the channel accepts no packet of this
        size.
        """
        try:
            channel.send(answer, _SEND_FLAGS)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return _UNSENDABLE
            if error.errno in _NO_SPACE:
                dropped = channel.session.drop_answer(channel.pulled)
                self._report(channel, AnswerDropped(dropped.channel, dropped.request))
                return RETURNED
        return outcome

    def _on_too_large(self) -> int:
        """The answer does not fit into a packet. The daemon runs the request again and sends the answer itself.

        Return the outcome of the request.
        """
        channel, request_id, packet = self._running
        handed = channel.session.hand_over(channel.pulled, packet, "too large")
        consequence = "the answer is too large for a direct channel"
        return self._return_request(channel, request_id, handed.request, packet, consequence)

    def _refuse_descriptors(self, channel: WorkerChannel, packet: bytes, ancillary: Any, now: float) -> None:
        """Hand over a packet that came with descriptors, which no client may send, and release the channel.

        Another thread closes the descriptors, because closing can block: a socket with SO_LINGER until its peer has
        read all data, a file until its file system answers. Therefore they are received at all: a read without space
        for them would close them in this thread.
        """
        session, pulled = channel.session, channel.pulled
        _close_in_thread(descriptors_in(ancillary))
        _, request_id, number, _, _ = channel.reader.read(packet)
        refusal = session.on_request(pulled, number, len(packet), now)
        self._hand_over(channel, request_id, number, packet, refusal)
        self._on_released(session.release(pulled.serial, OVERDRAWN))

    def _hand_over(self, channel: WorkerChannel, request_id: str, number: int, packet: bytes, reason: str) -> None:
        """Send a request that has not run to the daemon."""
        session, pulled = channel.session, channel.pulled
        session.hand_over(pulled, packet, reason)
        outcome = self._return_request(channel, request_id, number, packet, "the request has not run")
        self._on_released(session.on_handed_over(pulled, outcome))

    def _return_request(
        self, channel: WorkerChannel, request_id: str, number: int, packet: bytes, consequence: str
    ) -> int:
        """Send a request to the daemon. Without a daemon that knows its client and has room for it, send an error.

        A client decides how large its requests are and how many it sends, so the worker does not wait for the daemon.

        Return the outcome of the request.
        """
        reason = _NO_DAEMON
        if channel.session is self._session:
            if not self._connection.has_room(len(packet)):
                reason = _BUSY_DAEMON
            elif self._report(channel, RequestHandedOver(channel.pulled.serial, number), packet):
                return RETURNED
        if not request_id:
            return FAILED
        return self._send(channel, self._writer.refusal(request_id, Unavailable(f"{reason}; {consequence}")), FAILED)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _on_released(self, released: List[Released]) -> None:
        for each in released:
            channel = self._by_serial.pop(each.channel)
            descriptor = channel.socket.detach()
            del self._by_fd[descriptor]
            self._connection.unwatch(descriptor)
            if self._report(channel, ChannelReleased(each.channel, each.reason)):
                # The daemon has a duplicate, so this close does not close the descriptors in unread packets.
                os.close(descriptor)
            else:
                _close_in_thread([descriptor])

    def _report(self, channel: WorkerChannel, message: object, *frames: bytes) -> bool:
        """Send a message about a channel to the daemon. Return False if no daemon knows the channel."""
        return channel.session is self._session and self._connection.reply([*_encode(message), *frames])


def _encode(message: object) -> List[bytes]:
    return encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES)


def _close_in_thread(descriptors: Sequence[int]) -> None:
    try:
        threading.Thread(target=_close_all, args=(descriptors,), name="closing", daemon=True).start()
    except RuntimeError as error:
        _log.warning("descriptors of a client are not closed: %s", error)


def _close_all(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        # Linux frees the descriptor even if close(2) fails.
        with contextlib.suppress(OSError):
            os.close(each)
