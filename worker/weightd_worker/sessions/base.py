"""What all children do: HELLO, then one order after another, until told to stop.

One thread: while the engine works, messages wait in their sockets.
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

# How often what a predict leaves behind is looked at while they come.
HOUSEKEEPING_INTERVAL_S = 1.0
Entry = Tuple[ChildOrder, Sequence[Any]]
"""An order, and what belongs to it: the tensors of a predict, or those of a batch, each with its own."""


class Session(abc.ABC):
    """Obeys over one connection.

    Args:
        connection: to the daemon.
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
        """Say HELLO and obey until told to stop; return the exit status.

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
            # They may be large, and the next wait long.
            del order, tensors
            if time.monotonic() >= self._next_housekeeping_at:
                self._do_housekeeping()
        # The daemon has the bad news and will say Stop: leaving before it does could lose them.
        while not isinstance(self._next_order()[0], Stop):
            pass
        return self._status

    @abc.abstractmethod
    def _make_hello(self, sha256: str) -> Hello:
        """Return what this process is."""

    @abc.abstractmethod
    def _handle_order(self, order: ChildOrder) -> None:
        """Obey one that is no request. Whatever is raised is told, and ends the process."""

    def _next_order(self) -> Entry:
        """Wait for an order. What has come meanwhile is read first: a CancelPredict overtakes what it is about."""
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
                # This daemon may not have heard the bad news: that the process ends tells it.
                return Stop(), ()

    def _on_messages(self, messages: Sequence[Sequence[Any]]) -> None:
        for frames in messages:
            order = self._decoder.decode(frames)
            if isinstance(order, Predict):
                self._on_predict(order, frames[limits.MAX_HEADER_FRAMES :])
            elif isinstance(order, CancelPredict):
                self._on_cancel_predict(order)
            elif isinstance(order, MapRegion):
                # No predict before it can mean another one: its number is new, or that of a region that is given again.
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
        """Bound what libraries leave behind with each predict."""
        nativelog.truncate_if_too_large()
        self._next_housekeeping_at = time.monotonic() + HOUSEKEEPING_INTERVAL_S

    def _on_idle(self) -> None:  # noqa: B027 - most sessions have nothing to do
        """Nothing has come for as long as `_idle_timeout_s` says."""

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
        except Exception as error:  # noqa: BLE001 - the daemon is told, whatever a library raises
            _log.exception("%s", type(order).__name__)
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
    """In the order in which they came, in which they are obeyed. What has not come as a whole is not here yet."""

    def __init__(self) -> None:
        self._entries: Deque[Entry] = collections.deque()
        # Predicts of a batch, of which so many are still to come; and what has come behind the first of them.
        self._open_batch: Optional[BeginBatch] = None
        self._items: List[Any] = []
        self._missing_count = 0
        self._deferred: List[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, order: ChildOrder, tensors: Sequence[Any] = ()) -> None:
        """One has come.

        Raises:
            RemoteProtocolError: predicts of a batch are still to come.
        """
        if self._open_batch is not None:
            self._put_in_open_batch(self._open_batch, order, tensors)
        elif isinstance(order, BeginBatch):
            if len(order.principal_ids) not in (0, order.items):
                raise RemoteProtocolError(
                    f"principal_ids: expected {order.items}, or none, got {len(order.principal_ids)}"
                )
            self._open_batch, self._missing_count = order, order.items
        else:
            self._entries.append((order, tensors))

    def put_back(self, order: ChildOrder) -> None:
        """One was taken that is still to be obeyed, before all others."""
        self._entries.appendleft((order, ()))

    def take(self) -> Entry:
        """Return the first, and forget it."""
        return self._entries.popleft()

    @property
    def first(self) -> ChildOrder:
        """The order that is to be obeyed next."""
        return self._entries[0][0]

    def drop_incomplete_batch(self) -> None:
        """Forget predicts of which some will never come."""
        if self._open_batch is not None:
            self._items = []
            self._close_batch(self._open_batch)

    def cancel(self, request: int) -> bool:
        """A predict is taken back; return whether it was still here."""
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
        """A region is not to be taken away any more, if it was: no predict in between names it."""
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
            # A region that is taken away may be one that those before name; other orders come another way.
            self._deferred.append((order, tensors))

    def _close_batch(self, batch: BeginBatch) -> None:
        if self._items:
            self._entries.append((batch, self._items))
        self._entries.extend(self._deferred)
        self._open_batch, self._items, self._missing_count, self._deferred = None, [], 0, []


def _cancel_item(order: BeginBatch, items: Any, request: int) -> Optional[BeginBatch]:
    """Take a predict out of its batch; return the order without it, None if it is not there."""
    for index, part in enumerate(items):
        if part[0].request == request:
            items.remove(part)
            return dataclasses.replace(
                order, principal_ids=order.principal_ids[:index] + order.principal_ids[index + 1 :]
            )
    return None


def all_versions(engine_versions: Mapping[str, str]) -> Dict[str, str]:
    """Return the versions of all that computes here; `engine_versions` are those of its libraries."""
    return {"weightd": VERSION, "python": _PYTHON, "numpy": np.__version__, **engine_versions}


def check_signature(signature: ModelSignature) -> None:
    """Requests and answers give tensors by name: no two may have the same. And the wire has to carry it.

    Raises:
        BuildError: it cannot be.
    """
    for what, tensors in zip(ModelSignature._fields, signature):
        names = [each.name for each in tensors]
        for name in names:
            if names.count(name) > 1:
                raise BuildError(f"two {what} of the model have the name {name}")
    encode(Built("", signature.inputs, signature.outputs, (), "", 0))
