"""What all children do: HELLO, then one order after another, until told to stop.

One thread: while the engine works, messages wait in their sockets.
"""

from __future__ import annotations

import abc
import logging
import platform
import time
from typing import Any, Dict, Mapping, Sequence, Union

import numpy as np

from weightd_common.transient import is_transient, mentions_transient
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, clip, encode
from weightd_protocol.errors import WeightdError
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
from weightd_worker.channel import ChannelConnection
from weightd_worker.connection import WorkerConnection
from weightd_worker.engines.engine import ModelSignature
from weightd_worker.engines.errors import BuildError, OutOfDeviceMemory
from weightd_worker.inbox import Entry, Inbox
from weightd_worker.predictor import Predictor, Reply

_PYTHON = platform.python_version()

_log = logging.getLogger("weightd.worker")

# How often what a predict leaves behind is looked at while they come.
HOUSEKEEPING_INTERVAL_S = 1.0


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


class SessionBase(abc.ABC):
    """Obeys over one connection.

    Args:
        connection: to the daemon.
    """

    _predictor: Predictor
    """Runs requests; set by the subclass."""

    def __init__(self, connection: Union[WorkerConnection, ChannelConnection]) -> None:
        self._connection = connection
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
                self._status = self._predictor.predict(order, tensors)
            elif isinstance(order, BeginBatch):
                self._status = self._predictor.predict_batch(tensors, order.rows, order.principal_ids)
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
                self._predictor.regions.clear()
                self._send(self._make_reconnected())
            else:
                # This daemon may not have heard the bad news: that the process ends tells it.
                return Stop(), ()

    def _make_reconnected(self) -> Reconnected:
        """What another daemon is told."""
        return Reconnected()

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
                self._predictor.regions.map(order.region, self._connection.take_descriptor())
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

    @abc.abstractmethod
    def _on_idle(self) -> None:
        """Nothing has come for as long as `_idle_timeout_s` says."""

    def _execute_order(self, order: ChildOrder) -> int:
        if isinstance(order, UnmapRegion):
            self._predictor.regions.unmap(order.region)
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
