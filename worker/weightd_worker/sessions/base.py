"""Base class of all sessions: sends HELLO, then executes one order after another until the daemon sends Stop.

A session has one thread. While the engine computes, messages wait in the sockets.
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
from weightd_protocol.codec import Decoder, clip, encode
from weightd_protocol.errors import RemoteProtocolError, WeightdError
from weightd_protocol.messages.worker import (
    TO_CHILD,
    BeginBatch,
    Built,
    CancelPredict,
    ChildOrder,
    Hello,
    MapRegion,
    Predict,
    PredictCancelled,
    ProcessFailed,
    Reconnected,
    Stop,
    UnmapRegion,
)
from weightd_protocol.version import VERSION
from weightd_worker import exit_codes, nativelog
from weightd_worker.connection import Connection
from weightd_worker.engines.engine import BuildError, ModelSignature, OutOfDeviceMemory
from weightd_worker.predictor import Reply, RequestRunner

_PYTHON = platform.python_version()
_log = logging.getLogger("weightd.worker")

# Seconds between two checks of the log and the memory that predicts leave behind, while predicts arrive.
HOUSEKEEPING_INTERVAL_S = 1.0
Entry = Tuple[ChildOrder, Sequence[Any]]
"""An order with its tensors. A batch has, instead, its predicts, each with its tensors."""


class Session(abc.ABC):
    """Executes the daemon's orders over one connection.

    Args:
        connection: the connection to the daemon.
        runner: runs requests.
    """

    def __init__(self, connection: Connection, runner: RequestRunner) -> None:
        self._connection = connection
        self._runner = runner
        self._status = exit_codes.OK
        self._decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._next_housekeeping_at = 0.0
        self._idle_timeout_s = -1.0
        self._inbox = Inbox()

    def run(self, sha256: str) -> int:
        """Send HELLO and execute orders until the daemon sends Stop; return the exit status.

        Args:
            sha256: digest of the model.
        """
        self._send(self._make_hello(sha256))
        while self._status == exit_codes.OK:
            order, tensors = self._next_order()
            if isinstance(order, Predict):
                self._status = self._runner.predict(order, tensors)
            elif isinstance(order, BeginBatch):
                self._status = self._runner.predict_batch(tensors, order.rows, order.principal_ids)
            elif isinstance(order, Stop):
                return exit_codes.OK
            else:
                self._status = self._execute_order(order)
            # The tensors may be large, and the next order may be long in coming.
            del order, tensors
            if time.monotonic() >= self._next_housekeeping_at:
                self._do_housekeeping()
        # The daemon replies to a failure with Stop. Exiting before it arrives could lose the failure message.
        while not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    @abc.abstractmethod
    def _make_hello(self, sha256: str) -> Hello:
        """Return the HELLO message of this process."""

    @abc.abstractmethod
    def _handle_order(self, order: ChildOrder) -> None:
        """Execute an order other than a request. An exception is reported to the daemon and ends the process."""

    def _next_order(self) -> Entry:
        """Return the next order. Received messages are read first, so that a CancelPredict overtakes its Predict."""
        while True:
            messages = self._connection.receive(0 if self._inbox else self._idle_timeout_s)
            if messages:
                self._on_messages(messages)
            if self._inbox:
                return self._inbox.take()
            if messages is not None:
                if not messages:
                    self._on_idle()
            elif self._status == exit_codes.OK:
                self._inbox.drop_incomplete_batch()
                self._runner.regions.clear()
                self._send(Reconnected(self._runner.step))
            else:
                # This daemon may not have received the failure. The exit of the process shows it.
                return Stop(), ()

    def _on_messages(self, messages: Sequence[Sequence[Any]]) -> None:
        for frames in messages:
            order = self._decoder.decode(frames)
            if isinstance(order, Predict):
                self._on_predict(order, frames[limits.MAX_HEADER_FRAMES :])
            elif isinstance(order, CancelPredict):
                self._on_cancel_predict(order)
            elif isinstance(order, MapRegion):
                # Earlier predicts cannot mean another region: the number is new, or the same region is mapped again.
                self._inbox.cancel_unmap(order.region)
                self._runner.regions.map(order.region, self._connection.take_descriptor())
            else:
                self._inbox.put(order)

    def _on_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        self._inbox.put(order, tensors)

    def _on_cancel_predict(self, order: CancelPredict) -> None:
        if self._inbox.cancel(order.request):
            self._reply((PredictCancelled(order.request), ()))

    def _do_housekeeping(self) -> None:
        """Limit what libraries leave behind with each predict."""
        nativelog.truncate_if_too_large()
        self._next_housekeeping_at = time.monotonic() + HOUSEKEEPING_INTERVAL_S

    def _on_idle(self) -> None:  # noqa: B027 - most sessions have nothing to do
        """Handle a timeout of `_idle_timeout_s` without messages."""

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
    """Queue of received orders, in order of arrival. A batch enters the queue when all of its items have arrived."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()
        # The batch whose items are still arriving, its items so far, how many are missing, and orders behind the first.
        self._open_batch: Optional[BeginBatch] = None
        self._items: List[Any] = []
        self._missing_count = 0
        self._deferred: List[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: ChildOrder, tensors: Sequence[Any] = ()) -> None:
        """Add an order that has arrived.

        Raises:
            RemoteProtocolError: the order begins a batch within a batch, or its number of principals is wrong.
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
        """Put an order back in front of all others."""
        self._entries.appendleft((order, ()))

    def take(self) -> Entry:
        """Remove and return the first entry."""
        return self._entries.popleft()

    @property
    def first(self) -> ChildOrder:
        """The order that is executed next."""
        return self._entries[0][0]

    def drop_incomplete_batch(self) -> None:
        """Drop the items of a batch whose other items will never arrive."""
        if self._open_batch is not None:
            self._items = []
            self._close_batch(self._open_batch)

    def cancel(self, request: int) -> bool:
        """Remove a cancelled predict; return whether it was still in the queue."""
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
        """Remove the order to unmap a region, if there is one, because the region was mapped again."""
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
            # An order to unmap a region waits until the batch is complete, because its items may use the region. Other
            # orders are not sent on this channel.
            self._deferred.append((order, tensors))

    def _close_batch(self, batch: BeginBatch) -> None:
        if self._items:
            self._entries.append((batch, self._items))
        self._entries.extend(self._deferred)
        self._open_batch, self._items, self._missing_count, self._deferred = None, [], 0, []


def _cancel_item(order: BeginBatch, items: Any, request: int) -> Optional[BeginBatch]:
    """Remove a predict from its batch; return the batch order without it, or None if it is not in the batch."""
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
        BuildError: a name is given twice.
        LocalProtocolError: the protocol cannot carry the signature.
    """
    for what, tensors in zip(ModelSignature._fields, signature):
        names = [each.name for each in tensors]
        for name in names:
            if names.count(name) > 1:
                raise BuildError(f"two {what} of the model have the name {name}")
    encode(Built("", signature.inputs, signature.outputs, (), "", 0))
