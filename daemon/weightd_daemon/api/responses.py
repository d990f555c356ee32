"""Replies to clients: encodes and sends the replies, and updates the usage counters when a request ends."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from weightd_daemon.scheduling.request import Request
from weightd_daemon.transport.connection import ClientConnection
from weightd_daemon.transport.connections import ClientConnections
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_protocol import limits
from weightd_protocol.codec import clip, encode
from weightd_protocol.errors import Internal, InvalidArgument, LocalProtocolError, RequestError, ResourceExhausted
from weightd_protocol.framing import Message
from weightd_protocol.messages.control import ReloadResponse, ServerMetadataResponse
from weightd_protocol.messages.events import LogsResponse
from weightd_protocol.messages.inference import Error, InferResponse
from weightd_protocol.messages.metrics import MetricsResponse
from weightd_protocol.messages.regions import Released
from weightd_protocol.messages.status import StatusResponse
from weightd_protocol.messages.types import DaemonMessage
from weightd_protocol.messages.worker import PredictResult

# Seconds after which a client should retry when the memory budget is used up: an estimate of the time until a request
# ends or a client reads its replies.
_RETRY_AFTER_S = 0.1

_MEMORY_FULL = (
    "the daemon's memory budget for clients is used up (max_memory_bytes), and this client or its user holds most of it"
)

# Maximum header sizes in bytes of the types of messages whose headers may exceed `limits.MAX_HEADER_BYTES`.
_MAX_BYTES: Mapping[type[Any], int] = dict.fromkeys(
    (StatusResponse, MetricsResponse, LogsResponse, ServerMetadataResponse, ReloadResponse), limits.MAX_STATUS_BYTES
)

ShedRequests = Callable[[bytes, RequestError], object]


class ClientResponses:
    """Sends replies to clients, and reserves and releases the memory of their requests.

    Args:
        connections: the connections of all clients.
        memory_budget: the budget for memory that is held for clients.
        shed_requests: called with the key of a client and an error; ends all queued requests of the client with the
            error.

    Attributes:
        direct_clients: the keys of the clients that have direct channels.
        on_direct_client: called with each request of such a client, before the client gets the answer.
    """

    def __init__(
        self, connections: ClientConnections, memory_budget: MemoryBudget, shed_requests: ShedRequests
    ) -> None:
        self._connections = connections
        self._memory_budget = memory_budget
        self._shed_requests = shed_requests
        self.direct_clients: Container[bytes] = ()
        self.on_direct_client: Callable[[Request], object] = lambda request: None

    # --- replies ------------------------------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Send the model's answer to a request; only then update the usage counters, so that the client waits less."""
        if request.client in self.direct_clients:
            self.on_direct_client(request)
        may_still_write = True if request.pending_writes else None
        response = InferResponse(request.id, result.description, result.shared_outputs, may_still_write)
        self.reply(request.client, response, frames, request.buffered_bytes)
        request.usage.count_served(sum(map(len, frames)))
        self._end_request(request)

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Send the error with which a request ends, and update the usage counters."""
        self._memory_budget.release(request.client, request.buffered_bytes)
        request.usage.count_failed(error)
        self._end_request(request)
        self.reply_error(request.client, request.id, error, may_still_write=bool(request.pending_writes))

    def notify_released(self, request: Request) -> None:
        """Notify a client that no process can write to the shared memory for its request's outputs any more."""
        self.reply(request.client, Released(request.id))

    def reply_error(
        self, client: bytes, request_id: str, error: RequestError, *, may_still_write: bool = False
    ) -> None:
        """Send an error."""
        retry_after_us = None if error.retry_after is None else int(min(1e6 * error.retry_after, limits.MAX_TIMEOUT_US))
        self.reply(client, Error(request_id, error.code, clip(str(error)), retry_after_us, may_still_write or None))

    def reply(self, client: bytes, message: DaemonMessage, frames: Sequence[Any] = (), released_bytes: int = 0) -> None:
        """Release `released_bytes` of the client's reserved memory, and send a message to the client."""
        try:
            header = encode(message, _MAX_BYTES.get(message.__class__, limits.MAX_HEADER_BYTES))
        except LocalProtocolError as error:
            # Text from an engine or a long path may exceed the size of a header. Send an error instead of the message.
            header, frames = encode(Error(message.id, Internal.code, clip(f"the response cannot be sent: {error}"))), ()
        if released_bytes:
            self._memory_budget.release(client, released_bytes)
        if not self._connections.send(client, [*header, *frames]):
            dropped_error = ResourceExhausted("the response is dropped: the client has not read earlier responses")
            self._connections.send(client, encode(Error(message.id, dropped_error.code, str(dropped_error))))

    def reject_descriptors(self, connection: ClientConnection) -> None:
        """Close the descriptors that a client has sent with a message that is refused."""
        self._connections.reader.reject_descriptors(connection)

    # --- memory -------------------------------------------------------------------------------------------------

    def reserve_freed(self, request: Request) -> None:
        """Reserve memory for a request, after freeing memory of clients that hold more.

        Raises:
            ResourceExhausted: not enough memory could be freed.
        """
        if not self._reserve_freed(request, request.buffered_bytes):
            raise memory_full()

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Reserve `nbytes` more for a partial result of a request, if necessary after freeing memory of other clients.

        Raises:
            ResourceExhausted: not enough memory could be freed.
        """
        if not self._memory_budget.try_reserve(request.client, nbytes) and not self._reserve_freed(request, nbytes):
            raise memory_full()
        request.buffered_bytes += nbytes

    def free_memory(self, client: bytes, nbytes: int) -> bool:
        """Free memory until `nbytes` more fit into the budget; return False if `client` itself holds the most memory.

        The queued requests of the client that holds the most memory are ended with an error. If this frees nothing, or
        if at least half of the client's memory is replies that it has not read, the client is disconnected.
        """
        budget = self._memory_budget
        while not budget.can_reserve(nbytes):
            largest = budget.largest_client(client, nbytes)
            if largest == client:
                return False
            held = budget.used_by(largest)
            connection = self._connections.get(largest)
            unread = 0 if connection is None else connection.unread_bytes
            if 2 * unread < held:
                self._shed_requests(largest, memory_full())
            if budget.used_by(largest) == held:
                if connection is not None:
                    why = f"the client holds {held // 2**20} MiB, {unread // 2**20} MiB of them in unread responses"
                    self._connections.disconnect(connection, why)
                budget.release_all(largest)
        return True

    def _end_request(self, request: Request) -> None:
        """Count a request that has ended in the quota of its tenant and at its connection."""
        request.tenant.quota.end_request(request.nbytes, has_started=request.has_started)
        connection = self._connections.by_key.get(request.client)
        if connection is not None:
            connection.pending_requests -= 1

    def _reserve_freed(self, request: Request, nbytes: int) -> bool:
        return self.free_memory(request.client, nbytes) and self._memory_budget.try_reserve(request.client, nbytes)


def memory_full() -> ResourceExhausted:
    """Return the error for a message that does not fit into the memory budget."""
    return ResourceExhausted(_MEMORY_FULL, retry_after=_RETRY_AFTER_S)


def too_long_error(received: Message, max_bytes: int) -> RequestError:
    """Return the error for a message that was not received completely, because it is too long."""
    for name, length in zip(("envelope", "description"), received.lengths, strict=False):
        if length > limits.MAX_HEADER_BYTES:
            return InvalidArgument(f"{name}: expected at most {limits.MAX_HEADER_BYTES} bytes, got {length}")
    nbytes = sum(received.lengths)
    if nbytes > max_bytes:
        return InvalidArgument(f"frames: expected at most {max_bytes} bytes in all (max_memory_bytes), got {nbytes}")
    return memory_full()
