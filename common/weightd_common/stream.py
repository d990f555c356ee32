"""Messages over a connected unix stream socket. Never waits: who has to, waits for the socket."""

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

# What is read at once, unless a large frame is under way.
_CHUNK_BYTES = 64 * 1024

# What the kernel keeps where it is told to keep much; it counts twice as much for what it needs itself.
_SEND_BUFFER_BYTES = 256 * 1024

# Below this it costs less to copy a message into one piece than to have the kernel gather its frames.
_MAX_JOINED_BYTES = 16 * 1024

# Descriptors that wait to be taken: a message may bring one.
_MAX_DESCRIPTORS = 4

# Room for as many as the kernel passes at once (SCM_MAX_FD): the kernel would close those beyond it before the read
# returns, and a close may wait for as long as the peer likes.
_ANCILLARY_BYTES = socket.CMSG_SPACE(253 * array.array("i").itemsize)


def enlarge_send_buffer(connection: socket.socket) -> None:
    """Have the kernel keep more of what a peer has not read yet: messages that go together then arrive together.

    That memory is the sender's, so this is not for peers that nobody knows.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


class Stream:
    """One end of a connection.

    Args:
        connection: connected; this object owns it.
        frame_reader: finds messages in what comes.
        accepts_descriptors: whether the peer may send some; the kernel closes those that nobody takes.

    Attributes:
        descriptors: that have come and were not taken yet, in their order; whoever takes one owns it.
        has_more: the last read was of as much as is read at once, so that there may be more.
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
        # Small messages that wait for those that come after them; None where none do.
        self._corked: Optional[List[bytes]] = None
        # Bound once: they are called for each message.
        self._send, self._recv = connection.send, connection.recv

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self.connection.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait until the peer reads: `flush` when the socket can be written to."""
        return self._frame_writer.nbytes

    def send(self, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a message, or as much of it as goes now; return whether nothing is left.

        What is left goes with `flush`, when the socket can be written to. Frames are not copied: what is left must not
        be changed before it is sent. The descriptors stay the caller's, and may be closed at once.

        Raises:
            ConnectionError: the peer has gone, or the kernel has no memory for what it is sent: then both ends are told
                that the connection has ended.
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
        """Keep small messages back until `uncork`, so that they go with one call of the kernel."""
        if self._corked is None:
            self._corked = []

    def uncork(self) -> bool:
        """Send what was kept back, or as much of it as goes now; return whether nothing is left.

        Raises:
            ConnectionError: as for `send`.
        """
        corked, self._corked = self._corked, None
        if not corked:
            # Who waits for what is left calls `flush`, and has to know when it is gone.
            return not self._frame_writer.nbytes
        self._frame_writer.put(corked)
        return self.flush()

    def _send_chunks(self, chunks: List[Any], descriptors: Sequence[int]) -> bool:
        """Send what is too large to be copied into one piece, or brings descriptors, or has to wait its turn."""
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
        """Leave a message to `flush`. Like `send`, this neither copies the frames nor takes the descriptors.

        Raises:
            OSError: there is no number for a copy of a descriptor; the message is not queued.
        """
        self._frame_writer.put([message_prefix(frames), *frames], [os.dup(each) for each in descriptors])

    def flush(self) -> bool:
        """Send what is left; return whether nothing is left now.

        Raises:
            ConnectionError: as for `send`.
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
        """Return what an error of the kernel is to who sends: the stream may have been cut anywhere."""
        if error.errno not in (errno.ENOMEM, errno.ENOBUFS):
            return error
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return ConnectionAbortedError(error.errno, error.strerror)

    def receive(self) -> List[Message]:
        """Read once; return the messages that have come whole with that: none where nothing can be read.

        Raises:
            ConnectionError: the peer has gone.
            RemoteProtocolError: it broke the framing, or sends descriptors that nobody takes.
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
            raise ConnectionResetError("the peer has gone")
        self.has_more = len(data) == _CHUNK_BYTES
        return incoming.receive(data)

    def _receive_into_buffer(self, incoming: FrameReader) -> List[Message]:
        """Read a part of a large frame to where it stays."""
        if self._accepts_descriptors:
            count, ancillary, _, _ = self.connection.recvmsg_into(
                [incoming.read_buffer()], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
            if ancillary:
                self._collect_descriptors(ancillary)
        else:
            count = self.connection.recv_into(incoming.read_buffer())
        if not count:
            raise ConnectionResetError("the peer has gone")
        return incoming.on_filled(count)

    def _collect_descriptors(self, ancillary: List[Tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(content[: len(content) - len(content) % received.itemsize])
                self.descriptors.extend(received)
        if len(self.descriptors) > _MAX_DESCRIPTORS:
            raise RemoteProtocolError(f"descriptors: expected at most {_MAX_DESCRIPTORS} that are not consumed")

    def close(self) -> None:
        """Close the connection, and the descriptors that are not consumed or that were not sent."""
        self.connection.close()
        for each in (*self.descriptors, *self._frame_writer.clear()):
            os.close(each)
        self.descriptors.clear()


def _rights(descriptors: Sequence[int]) -> List[Tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
