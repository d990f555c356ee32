"""Sends requests on the direct channels of one client, and receives their answers. Never waits."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Sequence, Type, cast

from weightd.channels.calls import ChannelCalls, ClientChannel
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError, Unavailable, WeightdError
from weightd_protocol.framing import prefix_of
from weightd_protocol.messages.channels import ChannelOpened, pack_deadline
from weightd_protocol.messages.inference import Infer, Parameters
from weightd_protocol.packets import split_answer, split_request
from weightd_protocol.schema import label

if TYPE_CHECKING:
    from weightd.pending import PendingCall

_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# Errors after which the channel goes on: its queue is full, the packet is too large for it, or memory is short.
_PASSING_ERRORS = frozenset({errno.EAGAIN, errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM})

# Maximum number of packets in one call of `receive`, and of its calls before a notice is applied. A queue of the kernel
# holds fewer packets than both together.
_MAX_PACKETS = 64
_MAX_READS = 64


class ChannelSockets:
    """The sockets of a client's direct channels.

    Only the reader calls `receive` and the methods that close sockets. The caller of `send` holds `lock`, so that the
    reader does not close a socket on which another thread sends.

    Args:
        calls: the channels and the calls that use them.
        track: see `ClientCore.track`.
        untrack: see `ClientCore.untrack`.
        on_message: see `ClientCore.on_message`.

    Attributes:
        lock: the reader holds it while it closes sockets.
        by_descriptor: the channels to poll for reading, by descriptor. A change replaces the dictionary.
        before_close: called with each descriptor before it is closed.
    """

    def __init__(
        self,
        calls: ChannelCalls,
        track: Callable[[PendingCall, List[Any]], object],
        untrack: Callable[[PendingCall], None],
        on_message: Callable[[Sequence[Any], ClientChannel], None],
    ) -> None:
        self._calls = calls
        self._usable, self._tracked = calls.usable, calls.tracked
        self._track = track
        self._untrack = untrack
        self._on_message = on_message
        self.lock = threading.RLock()
        self.by_descriptor: Dict[int, ClientChannel] = {}
        self.before_close: Callable[[int], object] = lambda descriptor: None

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, call: PendingCall, frames: List[Any], deadline: float) -> bool:
        """Send a request on the channel of its description. Return False if it must be sent to the daemon."""
        channel = self._usable.get(call.description_frame)
        if channel is None:
            return False
        if self._calls.requests.tenant is not None:
            # The channel has the tenant for which it was opened.
            timeout_us = cast(Infer, call.request).parameters.timeout_us
            frames = self._with_parameters(call, frames, Parameters(timeout_us))
        prefix, _ = prefix_of((*map(len, frames),))
        packet = b"".join((pack_deadline(int(deadline * 1e6)), prefix, *frames))
        if not self._calls.begin_sending(channel, call, packet, monotonic()):
            return False
        self._track(call, frames)
        try:
            channel.end.send(packet, _SEND_FLAGS)
        except OSError as error:
            if error.errno not in _PASSING_ERRORS:
                self._calls.stop_sending(channel)
            if not self._calls.on_not_sent(channel, call):
                return True
            self._untrack(call)
            return False
        return True

    def take_frames(self, call: PendingCall) -> Optional[List[Any]]:
        """Return the frames with which a call is sent again, to the daemon, with the rest of its timeout.

        Return None if its deadline has passed.
        """
        packet, call.packet = call.packet or b"", None
        deadline_us, frames = split_request(packet)
        timeout_us = deadline_us - int(monotonic() * 1e6)
        if timeout_us <= 0:
            return None
        return self._with_parameters(call, frames, Parameters(timeout_us, tenant=self._calls.requests.tenant))

    def _with_parameters(self, call: PendingCall, frames: List[Any], parameters: Parameters) -> List[Any]:
        """Return the frames of a request with other parameters."""
        request = replace(cast(Infer, call.request), parameters=parameters)
        return [*encode(request), *frames[limits.MAX_HEADER_FRAMES :]]

    # --- the reader -------------------------------------------------------------------------------------------------

    def open(self, message: ChannelOpened, descriptor: int) -> None:
        """Take the client's end of a new channel. Close it if the client cannot use the channel."""
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, descriptor)
        except OSError:
            os.close(descriptor)
            return
        end.setblocking(False)
        channel = self._calls.add(message, end)
        if channel is None:
            end.close()
        else:
            self.by_descriptor = {**self.by_descriptor, descriptor: channel}

    def receive(self, channel: ClientChannel) -> bool:
        """Process the packets of a channel, as long as there are calls. Return whether there may be more packets.

        If the reader is interrupted, an answer may be lost. So the calls on the channel fail in this case.
        """
        try:
            for _ in range(_MAX_PACKETS):
                packet = channel.end.recv(limits.MAX_PACKET_BYTES)
                if not packet:
                    break
                self._on_message(split_answer(packet), channel)
                if not self._tracked:
                    return False
            else:
                return True
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # answers may lie behind the error
        except OSError:
            pass
        except RemoteProtocolError as error:
            self._abort(channel, RemoteProtocolError, f"{self._describe(channel)}: {error}")
            return False
        except BaseException:
            self._abort(channel, Unavailable, f"{self._describe(channel)} was closed in the middle of an answer")
            raise
        self._on_end(channel)
        return False

    def apply_notices(self) -> List[PendingCall]:
        """Read the channels of the daemon's notices, and apply the notices. Return the calls to send again."""
        for channel in self._calls.noticed_channels():
            for _ in range(_MAX_READS):
                if channel.is_read_to_end or not self.receive(channel):
                    break
        with self.lock:
            lost, ended = self._calls.apply_notices()
            self._close(ended)
        return lost

    def close_unused(self) -> None:
        """Close the channels of earlier connections that owe no answer. The caller holds the lock."""
        self._close(self._calls.take_unused())

    def close_all(self) -> None:
        """Close all channels."""
        with self.lock:
            channels = list(self._calls.channels.values())
            for channel in channels:
                self._calls.discard(channel)
            self._close(channels)

    # --- the connection ---------------------------------------------------------------------------------------------

    def on_disconnected(self) -> None:
        """Fail the calls whose channel has ended, because the daemon does not report what became of them."""
        with self.lock:
            self._fail_lost(self._calls.on_disconnected())

    # --- within -----------------------------------------------------------------------------------------------------

    def _on_end(self, channel: ClientChannel) -> None:
        with self.lock:
            failed = self._calls.on_end(channel)
            self._close([channel])
        self._fail_lost(failed)

    def _abort(self, channel: ClientChannel, kind: Type[WeightdError], text: str) -> None:
        with self.lock:
            failed = self._calls.abort(channel)
            self._close([channel])
        for call in failed:
            call.fail(kind(text))

    def _fail_lost(self, calls: Iterable[PendingCall]) -> None:
        for call in calls:
            call.fail(
                Unavailable(
                    "the direct channel to the model and the connection to the daemon are lost; the model may have run "
                    "the request"
                )
            )

    def _close(self, channels: List[ClientChannel]) -> None:
        """Close the ends of channels. They end even if a forked process has copies of the descriptors."""
        if channels:
            open_channels = self.by_descriptor.items()
            self.by_descriptor = {descriptor: each for descriptor, each in open_channels if each not in channels}
            for channel in channels:
                if channel.end.fileno() >= 0:
                    self.before_close(channel.end.fileno())
                with contextlib.suppress(OSError):
                    channel.end.shutdown(socket.SHUT_RDWR)
                channel.end.close()

    def _describe(self, channel: ClientChannel) -> str:
        return f"the direct channel to model {label(channel.model)}"
