"""Base class of all sessions: sends HELLO, then executes one order after another until the daemon sends Stop.

A session has one thread. While the engine runs a predict, further messages wait in the sockets.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import logging
import platform
import time
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightd_common.transient import is_transient, mentions_transient
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, clip, encode, type_name
from weightd_protocol.errors import RemoteProtocolError, WeightdError
from weightd_protocol.messages.regions import MapRegion, UnmapRegion
from weightd_protocol.messages.worker import (
    TO_CHILD,
    BeginBatch,
    Built,
    CancelPredict,
    ChildOrder,
    Hello,
    Predict,
    PredictCancelled,
    ProcessFailed,
    Reconnected,
    Stop,
    TrimStore,
)
from weightd_protocol.version import VERSION
from weightd_worker import exit_codes, nativelog
from weightd_worker.channels.direct import CHANNEL_ORDERS, ChannelOrder, DirectChannels
from weightd_worker.connection import Connection
from weightd_worker.engines.engine import BuildError, ModelSignature, OutOfDeviceMemory
from weightd_worker.predictor import Reply, RequestRunner

_PYTHON = platform.python_version()
_log = logging.getLogger("weightd.worker")

# Seconds between two checks of the size of the log and of retained memory while requests arrive.
HOUSEKEEPING_INTERVAL_S = 1.0

# An order that `_next_order` returns to process a request on a direct channel. It is recognized by its identity.
_SERVE_CHANNEL = TrimStore()

Entry = Tuple[ChildOrder, Sequence[Any]]
"""An order and its tensors. For a batch: the BeginBatch order, and its Predict orders, each with its tensors."""


class Session(abc.ABC):
    """Executes the daemon's orders, which arrive over one connection.

    Args:
        connection: the connection to the daemon.
        runner: runs the requests.
    """

    def __init__(self, connection: Connection, runner: RequestRunner) -> None:
        self._connection = connection
        self._runner = runner
        self._status = exit_codes.OK
        self._decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._next_housekeeping_at = 0.0
        self._idle_timeout_s = -1.0
        self._inbox = Inbox()
        # The direct channels of this worker; None without any. The channels and the daemon's orders take turns.
        self._direct_channels: Optional[DirectChannels] = None
        self._is_channel_turn = False

    def run(self, sha256: str) -> int:
        """Send HELLO and execute orders until the daemon sends Stop. Return the exit status.

        Args:
            sha256: the digest of the model.
        """
        self._send(self._make_hello(sha256))
        while self._status == exit_codes.OK:
            order, tensors = self._next_order()
            if order is _SERVE_CHANNEL:
                self._status = self._serve_channel()
            elif isinstance(order, Predict):
                self._status = self._runner.predict(order, tensors)
            elif isinstance(order, BeginBatch):
                self._status = self._runner.predict_batch(tensors, order.rows, order.principal_ids)
            elif isinstance(order, Stop):
                if self._direct_channels is not None:
                    self._direct_channels.drain()
                return exit_codes.OK
            else:
                self._status = self._execute_order(order)
            # Free the tensors now: they may be large, and it may take long until the next order arrives.
            del order, tensors
            if time.monotonic() >= self._next_housekeeping_at:
                self._do_housekeeping()
        if self._direct_channels is not None:
            self._direct_channels.close()
        # Wait for Stop, the daemon's reply to a failure. If this process exited earlier, the failure message could be
        # lost.
        while not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    @abc.abstractmethod
    def _make_hello(self, sha256: str) -> Hello:
        """Return the HELLO message of this process."""

    @abc.abstractmethod
    def _handle_order(self, order: ChildOrder) -> None:
        """Execute an order other than a request. If this fails, the caller reports the error and the process exits."""

    def _next_order(self) -> Entry:
        """Return the next order, or `_SERVE_CHANNEL` if a direct channel is readable and it is the channels' turn.

        All received messages are read first, so that a CancelPredict takes effect before its Predict is executed.
        """
        while True:
            messages = self._connection.receive(0 if self._inbox else self._idle_timeout_s)
            if messages:
                self._on_messages(messages)
            if self._direct_channels is not None and messages is not None and self._connection.ready:
                self._is_channel_turn = not (self._is_channel_turn and self._inbox)
                if self._is_channel_turn:
                    return _SERVE_CHANNEL, ()
            if self._inbox:
                return self._inbox.take()
            if messages is not None:
                if not messages:
                    self._on_idle()
            elif self._status == exit_codes.OK:
                self._inbox.drop_incomplete_batch()
                self._runner.regions.clear()
                if self._direct_channels is not None:
                    self._direct_channels.on_new_daemon()
                self._send(Reconnected(self._runner.step))
            else:
                # Exit now: the new daemon may not have received the failure message, but it will notice that this
                # process exits.
                return Stop(), ()

    def _on_messages(self, messages: Sequence[Sequence[Any]]) -> None:
        for frames in messages:
            order = self._decoder.decode(frames)
            if isinstance(order, Predict):
                self._on_predict(order, frames[limits.MAX_HEADER_FRAMES :])
            elif isinstance(order, CancelPredict):
                self._on_cancel_predict(order)
            elif isinstance(order, MapRegion):
                # Map the region at once, even if earlier predicts are queued. This is safe, because no queued predict
                # uses the region's number for another region: the number is new, or the same region is mapped again.
                self._inbox.cancel_unmap(order.region)
                self._runner.regions.map(order.region, self._connection.take_descriptor())
            elif isinstance(order, CHANNEL_ORDERS):
                self._on_channel_order(order)
            else:
                self._inbox.put(order)

    def _on_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        self._inbox.put(order, tensors)

    def _on_cancel_predict(self, order: CancelPredict) -> None:
        if self._inbox.cancel(order.request):
            self._reply((PredictCancelled(order.request), ()))

    def _on_channel_order(self, order: ChannelOrder) -> None:
        """Execute an order about direct channels as soon as it arrives, because its descriptor arrives with it."""
        raise RemoteProtocolError(f"type: expected no direct channel, got {type_name(order)}")

    def _serve_channel(self) -> int:
        """Process one request on a direct channel. Return OK, or the exit status if the process must exit."""
        assert self._direct_channels is not None  # noqa: S101 - `_next_order` has checked it
        status = self._direct_channels.serve(self._connection.ready)
        if status != exit_codes.OK:
            cause = self._direct_channels.failure or "a request on a direct channel may have corrupted the model"
            return self._report_failure(cause, status)
        return status

    def _do_housekeeping(self) -> None:
        """Limit the size of the log, to which libraries may write in each predict."""
        nativelog.truncate_if_too_large()
        self._next_housekeeping_at = time.monotonic() + HOUSEKEEPING_INTERVAL_S

    def _on_idle(self) -> None:  # noqa: B027 - most sessions have nothing to do
        """Called when no message has arrived for `_idle_timeout_s`."""

    def _execute_order(self, order: ChildOrder) -> int:
        if isinstance(order, UnmapRegion):
            self._runner.regions.unmap(order.region)
            return exit_codes.OK
        try:
            self._handle_order(order)
        except WeightdError as error:
            is_out_of_memory, transient = isinstance(error, OutOfDeviceMemory), is_transient(error)
            return self._report_failure(
                str(error), exit_codes.CANNOT_BUILD, is_out_of_memory=is_out_of_memory, is_transient=transient
            )
        except Exception as error:  # noqa: BLE001 - a failure is reported to the daemon, whatever a library raises
            _log.exception("order %s failed", type(order).__name__)
            cause = f"{type(error).__name__}: {error}"
            return self._report_failure(
                cause, exit_codes.FAILED, is_transient=is_transient(error) or mentions_transient(cause)
            )
        return exit_codes.OK

    def _report_failure(
        self, cause: str, status: int, *, is_out_of_memory: bool = False, is_transient: bool = False
    ) -> int:
        _log.error("%s", cause)
        self._send(ProcessFailed(clip(cause), is_out_of_memory, is_transient))
        return status

    def _send(self, message: object) -> None:
        self._connection.send(encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES))

    def _reply(self, *answers: Reply) -> None:
        self._connection.reply(
            *[[*encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *tensors] for message, tensors in answers]
        )


class Inbox:
    """Queue of received orders, in order of arrival. A batch enters the queue when all of its requests have arrived."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()
        # The batch whose requests are still arriving; its requests so far; the number of missing requests; and other
        # orders that have arrived meanwhile.
        self._open_batch: Optional[BeginBatch] = None
        self._items: List[Any] = []
        self._missing_count = 0
        self._deferred: List[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: ChildOrder, tensors: Sequence[Any] = ()) -> None:
        """Add an order that has arrived.

        Raises:
            RemoteProtocolError: the order begins a batch before the last batch is complete, or has a wrong number of
                principals.
        """
        if self._open_batch is not None:
            self._put_in_open_batch(self._open_batch, order, tensors)
        elif isinstance(order, BeginBatch):
            if len(order.principal_ids) not in (0, order.items):
                raise RemoteProtocolError(
                    f"principal_ids: expected {order.items} or none, got {len(order.principal_ids)}"
                )
            self._open_batch, self._missing_count = order, order.items
        else:
            self._entries.append((order, tensors))

    def put_back(self, order: ChildOrder) -> None:
        """Put an order in front of all other orders."""
        self._entries.appendleft((order, ()))

    def take(self) -> Entry:
        """Remove and return the first order with its tensors."""
        return self._entries.popleft()

    @property
    def first(self) -> ChildOrder:
        """The order that is executed next, which stays in the queue."""
        return self._entries[0][0]

    def drop_incomplete_batch(self) -> None:
        """Drop an incomplete batch after the daemon has restarted, because the missing requests will never arrive."""
        if self._open_batch is not None:
            self._items = []
            self._close_batch(self._open_batch)

    def cancel(self, request: int) -> bool:
        """Remove the predict of a request. Return whether it was still in the queue."""
        for index, entry in enumerate(self._entries):
            order, tensors = entry
            if isinstance(order, Predict):
                if order.request == request:
                    self._entries.remove(entry)
                    return True
            elif isinstance(order, BeginBatch):
                left = _cancel_item(order, tensors, request)
                if left is not None:
                    if tensors:
                        self._entries[index] = left, tensors
                    else:
                        del self._entries[index]
                    return True
        open_batch = None if self._open_batch is None else _cancel_item(self._open_batch, self._items, request)
        if open_batch is None:
            return False
        self._open_batch = open_batch
        return True

    def cancel_unmap(self, region: int) -> None:
        """Remove a queued order to unmap `region`, because the daemon has mapped this region again."""
        for entries in (self._entries, self._deferred):
            for entry in entries:
                if isinstance(entry[0], UnmapRegion) and entry[0].region == region:
                    entries.remove(entry)
                    return

    def _put_in_open_batch(self, batch: BeginBatch, order: ChildOrder, tensors: Sequence[Any]) -> None:
        if isinstance(order, Predict):
            self._items.append((order, tensors))
            self._missing_count -= 1
            if not self._missing_count:
                self._close_batch(batch)
        elif isinstance(order, BeginBatch):
            raise RemoteProtocolError(f"type: expected predict, {self._missing_count} more, got begin_batch")
        else:
            # This is an order to unmap a region; the daemon sends no other orders within a batch. Execute it after the
            # batch, whose requests may use the region.
            self._deferred.append((order, tensors))

    def _close_batch(self, batch: BeginBatch) -> None:
        if self._items:
            self._entries.append((batch, self._items))
        self._entries.extend(self._deferred)
        self._open_batch, self._items, self._missing_count, self._deferred = None, [], 0, []


def _cancel_item(order: BeginBatch, items: Any, request: int) -> Optional[BeginBatch]:
    """Remove the predict of a request from `items`, the requests of a batch.

    Return the BeginBatch order without the request's principal, or None if the request is not in the batch.
    """
    for index, part in enumerate(items):
        if part[0].request == request:
            items.remove(part)
            return dataclasses.replace(
                order, principal_ids=order.principal_ids[:index] + order.principal_ids[index + 1 :]
            )
    return None


def all_versions(engine_versions: Mapping[str, str]) -> Dict[str, str]:
    """Return the versions of weightd, Python, numpy and the engine's libraries."""
    return {"weightd": VERSION, "python": _PYTHON, "numpy": np.__version__, **engine_versions}


def check_signature(signature: ModelSignature) -> None:
    """Check that tensor names are unique among the inputs and among the outputs, and that the signature can be sent.

    Raises:
        BuildError: two inputs or two outputs have the same name.
        LocalProtocolError: the protocol cannot carry the signature.
    """
    for what, tensors in zip(ModelSignature._fields, signature):
        names = [each.name for each in tensors]
        for name in names:
            if names.count(name) > 1:
                raise BuildError(f"two {what} of the model have the name {name}")
    encode(Built("", signature.inputs, signature.outputs, (), "", 0))
