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

from weightd.protocol import limits
from weightd.protocol.codec import Decoder, clip, encode
from weightd.protocol.errors import WeightdError
from weightd.protocol.messages.children import (
    TO_CHILD,
    Back,
    Broken,
    Built,
    Hello,
    Map,
    ChildOrder,
    Predict,
    Skip,
    Skipped,
    Stop,
    Together,
    Unmap,
)
from weightd.protocol.version import VERSION
from weightd.shared.transient import is_transient, mentions_transient
from weightd.worker import exits, nativelog
from weightd.worker.connection import Connection
from weightd.worker.engines.engine import ModelSignature
from weightd.worker.engines.errors import BuildError, NoRoom
from weightd.worker.inbox import Entry, Inbox
from weightd.worker.lane import LaneConnection
from weightd.worker.predictor import Predictor, Told

_PYTHON = platform.python_version()

_log = logging.getLogger("weightd.worker")

# How often what a predict leaves behind is looked at while they come.
TIDY_S = 1.0


def versions(engine: Mapping[str, str]) -> Dict[str, str]:
    """Return the versions of all that computes here; `engine` are those of its libraries."""
    return {"weightd": VERSION, "python": _PYTHON, "numpy": np.__version__, **engine}


def check(signature: ModelSignature) -> None:
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


class Life(abc.ABC):
    """Obeys over one connection.

    Args:
        connection: to the daemon.
    """

    _predictor: Predictor
    """Runs requests; set by the subclass."""

    def __init__(self, connection: Union[Connection, LaneConnection]) -> None:
        self._connection = connection
        self._status = exits.OK
        self._decoder = Decoder(TO_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._tidy_at = 0.0
        self._patience_s = -1.0
        self._inbox = Inbox()

    def run(self, sha256: str) -> int:
        """Say HELLO and obey until told to stop; return the exit status.

        Args:
            sha256: digest of the model.
        """
        self._send(self._hello(sha256))
        while self._status == exits.OK:
            order, tensors = self._next()
            if isinstance(order, Predict):
                self._status = self._predictor.predict(order, tensors)
            elif isinstance(order, Together):
                self._status = self._predictor.together(tensors, order.rows, order.parties)
            elif isinstance(order, Stop):
                return exits.OK
            else:
                self._status = self._obey(order)
            # They may be large, and the next wait long.
            del order, tensors
            if time.monotonic() >= self._tidy_at:
                self._tidy()
        # The daemon has the bad news and will say Stop: leaving before it does could lose them.
        while not isinstance(self._next()[0], Stop):
            pass
        return self._status

    @abc.abstractmethod
    def _hello(self, sha256: str) -> Hello:
        """Return what this process is."""

    @abc.abstractmethod
    def _do(self, order: ChildOrder) -> None:
        """Obey one that is no request. Whatever is raised is told, and ends the process."""

    def _next(self) -> Entry:
        """Wait for an order. What has come meanwhile is read first: a Skip overtakes what it is about."""
        while True:
            messages = self._connection.receive(0 if self._inbox else self._patience_s)
            if messages:
                self._take(messages)
            if self._inbox:
                return self._inbox.take()
            if messages is not None:
                if not messages:
                    self._when_quiet()
            elif self._status == exits.OK:
                self._inbox.drop_begun()
                self._predictor.regions.clear()
                self._send(self._back())
            else:
                # This daemon may not have heard the bad news: that the process ends tells it.
                return Stop(), ()

    def _back(self) -> Back:
        """What another daemon is told."""
        return Back()

    def _take(self, messages: Sequence[Sequence[Any]]) -> None:
        for frames in messages:
            order = self._decoder.decode(frames)
            if isinstance(order, Predict):
                self._take_predict(order, frames[limits.MAX_HEADER_FRAMES :])
            elif isinstance(order, Skip):
                self._skip(order)
            elif isinstance(order, Map):
                # No predict before it can mean another one: its number is new, or that of a region that is given again.
                self._inbox.keep(order.region)
                self._predictor.regions.map(order.region, self._connection.take_descriptor())
            else:
                self._inbox.put(order)

    def _take_predict(self, order: Predict, tensors: Sequence[Any]) -> None:
        self._inbox.put(order, tensors)

    def _skip(self, order: Skip) -> None:
        if self._inbox.skip(order.request):
            self._answer((Skipped(order.request), ()))

    def _tidy(self) -> None:
        """Bound what libraries leave behind with each predict."""
        nativelog.bound()
        self._tidy_at = time.monotonic() + TIDY_S

    @abc.abstractmethod
    def _when_quiet(self) -> None:
        """Nothing has come for as long as `_patience_s` says."""

    def _obey(self, order: ChildOrder) -> int:
        if isinstance(order, Unmap):
            self._predictor.regions.unmap(order.region)
            return exits.OK
        try:
            self._do(order)
        except WeightdError as error:
            no_room, transient = isinstance(error, NoRoom), is_transient(error)
            return self._broken(str(error), exits.CANNOT_BUILD, no_room=no_room, transient=transient)
        except Exception as error:  # noqa: BLE001 - the daemon is told, whatever a library raises
            _log.exception("%s", type(order).__name__)
            cause = f"{type(error).__name__}: {error}"
            return self._broken(cause, exits.FAILED, transient=is_transient(error) or mentions_transient(cause))
        return exits.OK

    def _broken(self, cause: str, status: int, *, no_room: bool = False, transient: bool = False) -> int:
        _log.error("%s", cause)
        self._send(Broken(clip(cause), no_room, transient))
        return status

    def _send(self, message: object) -> None:
        self._connection.send(encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES))

    def _answer(self, *answers: Told) -> None:
        self._connection.answer(
            *[[*encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *tensors] for message, tensors in answers]
        )
