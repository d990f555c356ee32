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
from weightd_protocol.framing import LARGE_BYTES, PREFIX_PACKERS, FrameReader, FrameWriter, Message, message_prefix

# Size of a read, unless a large frame is in progress.
_CHUNK_BYTES = 64 * 1024

# Requested size of the send buffer. The kernel doubles it for its own overhead.
_SEND_BUFFER_BYTES = 256 * 1024

# Copying a smaller message into one piece is cheaper than having the kernel gather its frames.
_MAX_JOINED_BYTES = 16 * 1024

# Received descriptors that were not taken yet. A message may carry one.
_MAX_DESCRIPTORS = 4

# Room for as many descriptors as the kernel passes at once (SCM_MAX_FD). The kernel would close further ones before the
# read returns, and a close may block as long as the peer likes.
_ANCILLARY_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


def enlarge_send_buffer(connection: socket.socket) -> None:
    """Enlarge the kernel's send buffer, so that messages sent together also arrive together.

    The buffer is charged to the sender, so do not use it for untrusted peers.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


class Stream:
    """One end of a connection.

    Args:
        connection: a connected socket, which this object owns.
        frame_reader: parses the received messages.
        accepts_descriptors: whether the peer may send descriptors. Otherwise the kernel closes them.

    Attributes:
        descriptors: received descriptors that were not taken yet, in order. Code that takes one must close it.
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
        self._accepts_descriptors = accepts_descriptors
        self._frame_writer = FrameWriter()
        # Small messages that are held back; None if not corked.
        self._corked: Optional[List[bytes]] = None
        # Bound once, because they are called for each message.
        self._send, self._recv = connection.send, connection.recv

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.connection.fileno()

    @property
    def unsent(self) -> int:
        """Number of bytes that were not sent yet. Call `flush` when the socket is writable."""
        return self._frame_writer.nbytes

    def send(self, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> bool:
        """Send as much of a message as possible now. Return whether nothing is unsent.

        `flush` sends the rest when the socket is writable. Frames are not copied and must not be modified before they
        are sent. The descriptors remain the caller's, and may be closed at once.

        Raises:
            ConnectionError: the peer has disconnected, or the kernel is out of memory, in which case the connection is
                shut down for both ends.
        """
        lengths = [*map(len, frames)]
        size = sum(lengths)
        prefix = PREFIX_PACKERS[len(lengths)](len(lengths), *lengths)
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
        """Send as much of the held-back messages as possible now. Return whether nothing is unsent.

        Raises:
            ConnectionError: as `send`.
        """
        corked, self._corked = self._corked, None
        if not corked:
            # Data may still be unsent from before, which the caller sends by `flush`.
            return not self._frame_writer.nbytes
        self._frame_writer.put(corked)
        return self.flush()

    def _send_chunks(self, chunks: List[Any], descriptors: Sequence[int]) -> bool:
        """Send data that is too large to be joined, or has descriptors, or must wait for earlier data."""
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
        """Queue a message for `flush`. Like `send`, this neither copies the frames nor takes the descriptors.

        Raises:
            OSError: no file descriptor is left for a duplicate; the message is not queued.
        """
        self._frame_writer.put([message_prefix(frames), *frames], [os.dup(each) for each in descriptors])

    def flush(self) -> bool:
        """Send as much unsent data as possible now. Return whether nothing is unsent.

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
        """Return the error to raise for a kernel error. Shut the stream down if it may be cut for lack of memory."""
        if error.errno not in (errno.ENOMEM, errno.ENOBUFS):
            return error
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return ConnectionAbortedError(error.errno, error.strerror)

    def receive(self) -> List[Message]:
        """Read once and return the completed messages, an empty list if no data is available.

        Raises:
            ConnectionError: the peer has disconnected.
            RemoteProtocolError: the peer has violated the framing, or has sent too many descriptors.
        """
        incoming = self.frame_reader
        self.has_more = False
        try:
            if incoming.missing_bytes >= LARGE_BYTES:
                return self._receive_into_buffer(incoming)
            if self._accepts_descriptors:
                data, ancillary, _, _ = self.connection.recvmsg(_CHUNK_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
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
        """Read a part of a large frame directly into its buffer."""
        if self._accepts_descriptors:
            count, ancillary, _, _ = self.connection.recvmsg_into(
                [incoming.read_buffer()], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            if ancillary:
                self._collect_descriptors(ancillary)
        else:
            count = self.connection.recv_into(incoming.read_buffer())
        if not count:
            raise ConnectionResetError("the peer has disconnected")
        return incoming.on_filled(count)

    def _collect_descriptors(self, ancillary: List[Tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self.descriptors.extend(received)
        if len(self.descriptors) > _MAX_DESCRIPTORS:
            raise RemoteProtocolError(f"descriptors: expected at most {_MAX_DESCRIPTORS} unconsumed descriptors")

    def close(self) -> None:
        """Close the connection, and all descriptors that were not taken or not sent."""
        self.connection.close()
        for each in (*self.descriptors, *self._frame_writer.clear()):
            os.close(each)
        self.descriptors.clear()


def _rights(descriptors: Sequence[int]) -> List[Tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
