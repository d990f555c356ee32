"""Reads requests from direct channels, runs them, and sends the answers. Does the I/O of `ChannelSession`.

A client may send anything on its end, so nothing of a packet is used before it has been checked. The daemon has
validated the description of the tensors: a request runs only if its description has exactly the same bytes. All other
requests are handed over to the daemon, which processes them as if the client had sent them on its connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
import threading
from time import monotonic
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union, cast

from weightd_common.channels import messages
from weightd_common.channels.messages import Released
from weightd_common.channels.pages import DEVICE_LAYOUT
from weightd_common.stream import ANCILLARY_BYTES, descriptors_in
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, clip, encode, heading
from weightd_protocol.errors import DeadlineExceeded, RemoteProtocolError, RequestError, Unavailable
from weightd_protocol.framing import prefix_of
from weightd_protocol.messages.channels import (
    FROM_CHANNEL,
    MAX_REQUEST_NUMBER,
    AddChannel,
    AllowRequests,
    AnswerDropped,
    ChannelReleased,
    ReleaseChannel,
    RequestHandedOver,
    SetChannelRows,
)
from weightd_protocol.messages.inference import Error, Infer, InferResponse, RequestDescription
from weightd_protocol.messages.worker import Predict, PredictResult
from weightd_protocol.packets import split_request
from weightd_worker import exit_codes
from weightd_worker.channels.mapped_pages import MappedPages
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.session import ChannelSession
from weightd_worker.connection import Connection

ChannelOrder = Union[SetChannelRows, AddChannel, AllowRequests, ReleaseChannel]
CHANNEL_ORDERS = (SetChannelRows, AddChannel, AllowRequests, ReleaseChannel)

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

_LATE = DeadlineExceeded("was waiting on its direct channel at its deadline")
_NO_DAEMON = Unavailable("the daemon is restarting; the request has not run")
_TOO_LARGE = Unavailable("the daemon is restarting; the answer is too large for a direct channel")


_log = logging.getLogger("weightd.worker")


class _Refused(Exception):
    """A packet is not a request that a worker may run."""


class WorkerChannel:
    """The workers' end of a direct channel, with the descriptions of the requests that may run.

    Args:
        session: the session to which the channel belongs.
        pulled: the channel in the session.
        end: the workers' end, which this object owns.
    """

    __slots__ = ("descriptions", "digests", "pulled", "receive", "send", "session", "socket")

    def __init__(self, session: ChannelSession, pulled: PulledChannel, end: socket.socket) -> None:
        self.session = session
        self.pulled = pulled
        self.socket = end
        # The bound methods are stored, because looking them up for each request would take time.
        self.receive, self.send = end.recvmsg, end.send
        self.descriptions: Set[bytes] = set()
        # The digests of allowed descriptions whose bytes no request has had yet.
        self.digests: Set[str] = set()

    def allow(self, digest: str) -> None:
        """Allow the requests whose description has this digest."""
        if len(self.descriptions) + len(self.digests) < limits.MAX_CHANNEL_DESCRIPTIONS:
            self.digests.add(digest)

    def learn(self, description: bytes) -> bool:
        """Return whether a description has an allowed digest, and remember its bytes."""
        if not self.digests:
            return False
        digest = hashlib.sha256(description).hexdigest()
        if digest not in self.digests:
            return False
        self.digests.remove(digest)
        self.descriptions.add(description)
        return True


class DirectChannels:
    """The direct channels of a worker.

    Args:
        connection: the connection to the daemon, which also waits for requests on the channels.
        run_request: runs a request.
    """

    def __init__(self, connection: Connection, run_request: RunRequest) -> None:
        self._connection = connection
        self._run_request = run_request
        self._decoder: Decoder[Infer] = Decoder(FROM_CHANNEL)
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
        self._is_closed = False

    # --- orders -------------------------------------------------------------------------------------------------------

    def on_order(self, order: ChannelOrder) -> None:
        """Execute an order of the daemon. Call this between two requests, in the order of arrival."""
        if isinstance(order, AddChannel):
            self._add(order)
        elif isinstance(order, AllowRequests):
            self._allow(order)
        elif isinstance(order, ReleaseChannel):
            self._release(order)
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
        self._session.set_rows(rows, [rows[each] for each in order.peers])

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
        channel = WorkerChannel(session, session.channels[order.channel], socket.socket(fileno=descriptor))
        self._by_serial[order.channel] = self._by_fd[descriptor] = channel
        self._connection.watch(descriptor)

    def _allow(self, order: AllowRequests) -> None:
        """Run the requests with a description from now on. The channel may have been released already."""
        channel = self._by_serial.get(order.channel)
        if channel is not None:
            channel.allow(order.digest)

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
            packet, ancillary, _, _ = channel.receive(_READ_BYTES, ANCILLARY_BYTES, _RECEIVE_FLAGS)
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
        deadline_us, request_id, number, description, tensors = self._parse(channel, packet)
        refusal = session.on_request(pulled, number, len(packet), now)
        if refusal or description is None:
            self._hand_over(channel, request_id, number, packet, refusal)
        elif deadline_us <= now * 1e6:
            self._send(channel, request_id, encode(_error(request_id, _LATE)), packet)
            session.on_answered(pulled)
        else:
            session.run(now)
            self._running = channel, request_id, packet
            self._started_at = monotonic()
            return self._run_request(Predict(number, description), tensors, self._on_reply)
        return exit_codes.OK

    def _of_one_session(self, readable: List[PulledChannel]) -> Tuple[Optional[ChannelSession], List[PulledChannel]]:
        """Return the readable channels of the oldest session that has any."""
        self._retired = [each for each in self._retired if each.channels]
        for session in self._retired:
            found = [each for each in readable if session.channels.get(each.serial) is each]
            if found:
                return session, found
        return self._session, readable

    def _parse(
        self, channel: WorkerChannel, packet: bytes
    ) -> Tuple[int, str, int, Optional[RequestDescription], Sequence[bytes]]:
        """Return deadline, id, number, description and tensors of a request.

        The description is None if the worker must not run the request. The number is 0 without a valid id.
        """
        frames: List[bytes] = []
        try:
            deadline_us, frames = split_request(packet)
            description = frames[1]
            if description not in channel.descriptions and not channel.learn(description):
                raise _Refused
            request = self._decoder.decode(frames)
            number = _number_of(request.id)
            parameters = request.parameters
            if number and parameters.regions is None and parameters.priority is None and parameters.tenant is None:
                return deadline_us, request.id, number, request.description, frames[2:]
        except (RemoteProtocolError, _Refused):
            pass
        request_id, number = _heading(frames)
        return 0, request_id, number, None, ()

    def _on_reply(self, reply: Tuple[object, Sequence[Any]]) -> None:
        """Send the reply to the running request to the client."""
        seconds = monotonic() - self._started_at
        channel, request_id, packet = self._running
        session, pulled = channel.session, channel.pulled
        session.on_result(pulled, seconds)
        message: Any = reply[0]
        if message.__class__ is PredictResult:
            frames = [*encode(InferResponse(request_id, message.description)), *reply[1]]
            self._send(channel, request_id, frames, packet)
            session.on_answered(pulled)
            return
        self._send(channel, request_id, encode(Error(request_id, message.code, message.error)), packet)
        # The row of a process that exits shows the request that was the cause.
        if not message.is_exiting:
            session.on_answered(pulled)

    def _send(self, channel: WorkerChannel, request_id: str, frames: Sequence[Any], packet: bytes) -> None:
        """Send an answer to the request in `packet`, or report to the daemon why this is impossible."""
        prefix, nbytes = prefix_of((*map(len, frames),))
        if len(prefix) + nbytes > limits.MAX_PACKET_BYTES:
            self._on_too_large(channel, request_id, packet)
            return
        try:
            channel.send(b"".join((prefix, *frames)), _SEND_FLAGS)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self._on_too_large(channel, request_id, packet)
            elif error.errno in _NO_SPACE:
                dropped = channel.session.drop_answer(channel.pulled)
                self._report(channel, AnswerDropped(dropped.channel, dropped.request))

    def _on_too_large(self, channel: WorkerChannel, request_id: str, packet: bytes) -> None:
        """The answer does not fit into a packet. The daemon runs the request again and sends the answer itself."""
        handed = channel.session.hand_over(channel.pulled, packet, "too large")
        if not self._report(channel, RequestHandedOver(handed.channel, handed.request), packet):
            self._send(channel, request_id, encode(_error(request_id, _TOO_LARGE)), packet)

    def _refuse_descriptors(self, channel: WorkerChannel, packet: bytes, ancillary: Any, now: float) -> None:
        """Hand over a packet that came with descriptors, which no client may send, and release the channel.

        Another thread closes the descriptors, because closing can block: a socket with SO_LINGER until its peer has
        read all data, a file until its file system answers. Therefore they are received at all: a read without space
        for them would close them in this thread.
        """
        session, pulled = channel.session, channel.pulled
        _close_in_thread(descriptors_in(ancillary))
        request_id, number = _heading(_split(packet))
        refusal = session.on_request(pulled, number, len(packet), now)
        self._hand_over(channel, request_id, number, packet, refusal)
        self._on_released(session.release(pulled.serial, messages.OVERDRAWN))

    def _hand_over(self, channel: WorkerChannel, request_id: str, number: int, packet: bytes, reason: str) -> None:
        """Send a request that has not run to the daemon. Without a daemon that knows its client, it gets an error."""
        session, pulled = channel.session, channel.pulled
        session.hand_over(pulled, packet, reason)
        if not self._report(channel, RequestHandedOver(pulled.serial, number), packet) and request_id:
            self._send(channel, request_id, encode(_error(request_id, _NO_DAEMON)), packet)
        self._on_released(session.on_handed_over(pulled))

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


def _error(request_id: str, error: RequestError) -> Error:
    return Error(request_id, error.code, clip(str(error)))


def _split(packet: bytes) -> List[bytes]:
    """Return the frames of a request, or [] if its framing is invalid."""
    try:
        return split_request(packet)[1]
    except RemoteProtocolError:
        return []


def _heading(frames: Sequence[bytes]) -> Tuple[str, int]:
    """Return the id and the number of a request that was not decoded; "" and 0 without a valid id."""
    request_id = heading(frames).id
    return request_id, _number_of(request_id)


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


def _number_of(request_id: str) -> int:
    """Return the number that a request's id is in decimal, without leading zeros; 0 if it is no such number."""
    try:
        number = int(request_id)
    except ValueError:
        return 0
    return number if 0 < number <= MAX_REQUEST_NUMBER and str(number) == request_id else 0
