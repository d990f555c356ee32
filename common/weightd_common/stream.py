"""Non-blocking message I/O on a connected unix stream socket. Callers poll the socket themselves."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque
from typing import Any, Deque, List, Optional, Sequence, Tuple

from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, FrameReader, FrameWriter, Message, message_prefix, prefix_of

# Maximum number of bytes in one read, except for a large frame, which is read directly into its buffer.
_CHUNK_BYTES = 64 * 1024

# Size in bytes that is requested for the kernel's send buffer. The kernel doubles the number for its own overhead.
_SEND_BUFFER_BYTES = 256 * 1024

# Maximum size in bytes of a message whose frames are copied into one buffer before sending. For larger messages, it is
# faster to let the kernel gather the frames.
_MAX_JOINED_BYTES = 16 * 1024

# Maximum number of received descriptors that the owner of a Stream has not taken yet. A message may carry one
# descriptor.
_MAX_DESCRIPTORS = 4

# From <asm-generic/socket.h>; Python's socket module does not have this constant.
_SO_PASSRIGHTS = 83

# Size of the buffer for received descriptors: enough for the 253 descriptors (SCM_MAX_FD) that the kernel passes at
# most with one read. If the buffer were smaller, the kernel would close the other descriptors during the read, and
# closing a descriptor of a peer's file system can block.
ANCILLARY_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


def enlarge_send_buffer(connection: socket.socket) -> None:
    """Enlarge the kernel's send buffer of a connection, so that messages sent together also arrive together.

    The kernel charges the buffered messages to this process, so do not enlarge it for a peer that is not trusted.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


class Stream:
    """One end of a connected unix stream socket, over which both ends exchange messages.

    Args:
        connection: the connected socket, which this object owns and closes.
        frame_reader: parses the received messages; None for a reader with the default limits.
        accepts_descriptors: whether the peer may send file descriptors. If not, the kernel closes the peer's
            descriptors.

    Attributes:
        accepts_descriptors: as above; it may change at any time.
        descriptors: received file descriptors in the order of arrival. Code that removes one must close it.
        has_more: whether the last read filled its buffer, so that more data may be available.
    """

    def __init__(
        self,
        connection: socket.socket,
        frame_reader: Optional[FrameReader] = None,
        *,
        accepts_descriptors: bool = False,
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.frame_reader = frame_reader or FrameReader()
        self.descriptors: Deque[int] = deque()
        self.has_more = False
        self.accepts_descriptors = accepts_descriptors
        self._frame_writer = FrameWriter()
        # Small messages that are held back between `cork` and `uncork`; None at other times.
        self._corked: Optional[List[bytes]] = None
        # The bound methods are stored, because looking them up for each message would take time.
        self._send, self._recv = connection.send, connection.recv

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.connection.fileno()

    @property
    def unsent(self) -> int:
        """Number of bytes that were not sent yet. `flush` sends them when the socket is writable."""
        return self._frame_writer.nbytes

    def send(self, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> bool:
        """Send as much of a message as the socket accepts now. Return whether everything is sent.

        If the result is False, call `flush` when the socket is writable. Frames are not copied, so the caller must not
        modify them before they are sent. The descriptors are duplicated, so the caller may close them at once.

        Raises:
            ConnectionError: the peer has disconnected, or the kernel is out of memory, in which case the connection is
                shut down for both ends.
        """
        prefix, size = prefix_of((*map(len, frames),))
        if size > _MAX_JOINED_BYTES or descriptors or self._frame_writer.nbytes:
            if self._corked:
                self.uncork()
                self.cork()
            return self._send_chunks([prefix, *frames], descriptors)
        message = prefix + b"".join(frames)
        if self._corked is not None:
            self._corked.append(message)
            return True
        try:
            sent = self._send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._connection_error(error) from None
        if sent == len(message):
            return True
        self._frame_writer.put([memoryview(message)[sent:]])
        return False

    def cork(self) -> None:
        """Hold back small messages until `uncork`, to send them in one system call."""
        if self._corked is None:
            self._corked = []

    def uncork(self) -> bool:
        """Send as many of the held-back messages as the socket accepts now. Return whether everything is sent.

        Raises:
            ConnectionError: as `send`.
        """
        corked, self._corked = self._corked, None
        if not corked:
            # No message was held back, but data from before may be unsent, which the caller sends by `flush`.
            return not self._frame_writer.nbytes
        self._frame_writer.put(corked)
        return self.flush()

    def _send_chunks(self, chunks: List[Any], descriptors: Sequence[int]) -> bool:
        """Send a message that is too large to join its frames, that has descriptors, or that follows unsent data."""
        if not self._frame_writer.nbytes:
            try:
                sent = self.connection.sendmsg(chunks, _rights(descriptors))
            except BlockingIOError:
                pass
            except OSError as error:
                raise self._connection_error(error) from None
            else:
                self._frame_writer.put(chunks)
                self._frame_writer.on_written(sent)
                return not self._frame_writer.nbytes
        self._frame_writer.put(chunks, [os.dup(each) for each in descriptors])
        return False

    def queue(self, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        """Queue a message without sending it; `flush` sends it later. Frames and descriptors are treated as in `send`.

        Raises:
            OSError: a descriptor cannot be duplicated, because this process has too many. The message is not queued.
        """
        self._frame_writer.put([message_prefix(frames), *frames], [os.dup(each) for each in descriptors])

    def flush(self) -> bool:
        """Send as much of the unsent data as the socket accepts now. Return whether everything is sent.

        Raises:
            ConnectionError: as `send`.
        """
        while self._frame_writer.nbytes:
            chunks, descriptors = self._frame_writer.next_chunks()
            try:
                sent = self.connection.sendmsg(chunks, _rights(descriptors))
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._connection_error(error) from None
            self._frame_writer.on_written(sent)
            for each in descriptors:
                os.close(each)
        return True

    def _connection_error(self, error: OSError) -> OSError:
        """Return the error to raise for an error of a send call.

        If the kernel is out of memory, it may have sent a part of a message. The peer could not parse the next message
        then, so shut down the connection.
        """
        if error.errno not in (errno.ENOMEM, errno.ENOBUFS):
            return error
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return ConnectionAbortedError(error.errno, error.strerror)

    def receive(self) -> List[Message]:
        """Read once from the socket and return the messages that are now complete, or [] if no data is available.

        Raises:
            ConnectionError: the peer has disconnected.
            RemoteProtocolError: the peer has violated the framing, or has sent too many descriptors.
        """
        incoming = self.frame_reader
        self.has_more = False
        try:
            if incoming.missing_bytes >= LARGE_BYTES:
                return self._receive_into_buffer(incoming)
            if self.accepts_descriptors:
                data, ancillary, _, _ = self.connection.recvmsg(_CHUNK_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
                if ancillary:
                    self._collect_descriptors(ancillary)
            else:
                data = self._recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the peer has disconnected")
        self.has_more = len(data) == _CHUNK_BYTES
        return incoming.receive(data)

    def _receive_into_buffer(self, incoming: FrameReader) -> List[Message]:
        """Read the next part of a large frame directly into the frame's buffer."""
        if self.accepts_descriptors:
            count, ancillary, _, _ = self.connection.recvmsg_into(
                [incoming.read_buffer()], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            if ancillary:
                self._collect_descriptors(ancillary)
        else:
            count = self.connection.recv_into(incoming.read_buffer())
        if not count:
            raise ConnectionResetError("the peer has disconnected")
        return incoming.on_filled(count)

    def _collect_descriptors(self, ancillary: List[Tuple[int, int, bytes]]) -> None:
        self.descriptors.extend(descriptors_in(ancillary))
        if len(self.descriptors) > _MAX_DESCRIPTORS:
            raise RemoteProtocolError(f"descriptors: expected at most {_MAX_DESCRIPTORS} unconsumed descriptors")

    def close(self) -> None:
        """Close the connection, and all received or unsent descriptors that this object still holds."""
        self.connection.close()
        for each in (*self.descriptors, *self._frame_writer.clear()):
            os.close(each)
        self.descriptors.clear()


def refuse_descriptors(connection: socket.socket) -> bool:
    """Have the kernel refuse the descriptors that the peer of a Unix socket sends. Return False if it cannot.

    This needs the socket option SO_PASSRIGHTS of Linux 6.16. A connection inherits the option from its listener.
    Descriptors that were sent before are not refused.
    """
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def refuses_descriptors(connection: socket.socket) -> bool:
    """Return whether the kernel refuses the descriptors that the peer of a Unix socket sends."""
    try:
        return not connection.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS)
    except OSError:
        return False


def descriptors_in(ancillary: List[Tuple[int, int, bytes]]) -> List[int]:
    """Return the file descriptors in the ancillary data of a message, as `recvmsg` returns it."""
    descriptors: List[int] = []
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
            descriptors.extend(received)
    return descriptors


def _rights(descriptors: Sequence[int]) -> List[Tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
