"""The blocking client."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from types import TracebackType
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Type, cast

import zmq

from weightd.client.address import default_address
from weightd.client.connection import connect
from weightd.client.core import Answer, Call, ClientCore, Started
from weightd.protocol import limits
from weightd.protocol.errors import DeadlineExceeded, InvalidArgument, RemoteProtocolError, Unavailable, WeightdError
from weightd.protocol.messages.control import (
    ModelMetadataResponse,
    ReadyResponse,
    ReloadResponse,
    ServerMetadataResponse,
    UpdateResponse,
)
from weightd.protocol.messages.status import StatusResponse

DEFAULT_TIMEOUT_S = 30.0

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6
_MAX_GRACE_S = 0.5


class WrongThread(WeightdError):
    """A Client is used by another thread or process than the one that made it. Make one for each: they are cheap."""


class ClientClosed(WeightdError):
    """A Client is used after `close`, or after the end of its `with` block."""


class Pending:
    """A request under way. Its answer is fetched with `result`, in any order; without a Pending, it is dropped."""

    __slots__ = ("_cancel", "_poll", "_wait")

    def __init__(self, wait: Callable[[], Answer], poll: Callable[[], bool], cancel: Callable[[], None]) -> None:
        self._wait = wait
        self._poll = poll
        self._cancel = cancel

    def done(self) -> bool:
        """Whether the request has ended, in an answer or in an error; never waits."""
        return self._poll()

    def cancel(self) -> None:
        """Take the request back, if it has not ended: no worker begins with it, and `result` raises `Cancelled`.

        An answer that is on its way already may still come, and counts.

        Raises:
            DeadlineExceeded: it could not be sent within the client's timeout: the daemon reads nothing.
        """
        self._cancel()

    def result(self) -> Dict[str, Any]:
        """Wait for the answer until the deadline that `submit` was given.

        Returns:
            The outputs by name: numpy arrays, read-only.

        Raises:
            RequestError: the request ended in an error; one subclass for each code of the wire.
        """
        return cast(Dict[str, Any], self._wait())


class Client:
    """Asks a weightd daemon for inference.

    For one thread: use by another, or by a forked process, is a `WrongThread` error. Use it as a context manager, or
    `close` it. If the connection is lost, whatever is under way ends at once in `Unavailable`, and the next call
    connects again.

    Args:
        address: where the daemon listens, ipc:///PATH or tcp://HOST:PORT. Default: $WEIGHTD_SOCKET, or where the
            daemon of this user or of the system listens by default.
        timeout: seconds that a call waits unless it says otherwise; at most one hour.

    Raises:
        InvalidArgument: `address` is none, or `timeout` is out of bounds.
        PermissionDenied: this user may not connect.
        Unavailable: nobody listens there.
        DeadlineExceeded: somebody listens there and does not answer.
    """

    def __init__(self, address: Optional[str] = None, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self.address = default_address() if address is None else address
        self.timeout = _checked(timeout)
        self._owner = (os.getpid(), threading.get_ident())
        self._closed = False
        self._core = ClientCore()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._connection = connect(self._context, self.address, time.monotonic() + timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def infer(self, model: str, inputs: Mapping[str, Any], *, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Run `model` on `inputs` and return its outputs.

        Args:
            model: the model's name in the daemon's configuration.
            inputs: an array for each input, by name; anything that `numpy.asarray` takes. Datatype, rank and fixed
                dimensions must be the model's (see `metadata`): nothing is converted in silence.
            timeout: seconds to wait; the client's where it is None. The daemon gives up then and says why; a client
                that does not hear from it gives up a tenth of that time later, at most half a second.

        Returns:
            The outputs by name: numpy arrays, read-only.

        Raises:
            RequestError: one subclass for each code of the wire, `DeadlineExceeded` among them. `Unavailable` also
                where the connection is lost; the request may have been run then, and nothing is sent again.
            ProtocolError: one side broke the protocol: versions that do not fit.
            WrongThread, ClientClosed: the client must not be used here, or no longer.
        """
        seconds, deadline = self._begin(timeout)
        return cast(Dict[str, Any], self._ask(self._core.infer(model, inputs, seconds), seconds, deadline))

    def submit(self, model: str, inputs: Mapping[str, Any], *, timeout: Optional[float] = None) -> Pending:
        """Send a request without waiting; many may be under way at once.

        The arrays must not be changed before the answer has come: large ones are not copied.
        Arguments and errors as for `infer`.
        """
        seconds, deadline = self._begin(timeout)
        call, frames = self._core.infer(model, inputs, seconds)
        self._send(frames, deadline)
        return Pending(
            partial(self._wait, call, deadline + _grace(seconds)),
            partial(self._poll, call),
            partial(self._cancel, call),
        )

    def ready(self, model: str = "", *, timeout: Optional[float] = None) -> ReadyResponse:
        """Return whether a model can answer: a worker of it has done so within the watchdog's period. Never waits.

        Args:
            model: the model's name; "" for all of them together.
            timeout: seconds to wait for this answer.

        Raises:
            RequestError: as `infer`.
        """
        seconds, deadline = self._begin(timeout)
        return cast(ReadyResponse, self._ask(self._core.ready(model), seconds, deadline))

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives. Waits while it loads.

        Raises:
            RequestError: as `infer`.
        """
        seconds, deadline = self._begin(timeout)
        return cast(ModelMetadataResponse, self._ask(self._core.model_metadata(model), seconds, deadline))

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models.

        Raises:
            RequestError: as `infer`.
        """
        seconds, deadline = self._begin(timeout)
        return cast(ServerMetadataResponse, self._ask(self._core.server_metadata(), seconds, deadline))

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: models, generations, processes and their memory.

        Raises:
            RequestError: as `infer`.
        """
        seconds, deadline = self._begin(timeout)
        return cast(StatusResponse, self._ask(self._core.status(), seconds, deadline))

    def update(
        self,
        model: str,
        path: str = "",
        *,
        weights: str = "",
        rollback: bool = False,
        timeout: Optional[float] = None,
    ) -> UpdateResponse:
        """Have another model, or other weights, loaded beside what serves, and wait until it has taken over.

        What goes wrong leaves everything as it was. Only the daemon's own user, and root, may do this.

        Args:
            model: the model's name.
            path: of the new model file, absolute, on the daemon's host; "" keeps the present one.
            weights: of an .npz file with arrays to load over the model's weights, absolute; "" for none.
            rollback: go back to what served before the last update instead; what is given up so is not kept.
            timeout: seconds to wait; after them `DeadlineExceeded`. The update itself goes on, see `status`.

        Raises:
            RequestError: as `infer`; `Unavailable` and `FailedPrecondition` tell why the old model still serves, and
                whether the same update may succeed later.
        """
        seconds, deadline = self._begin(timeout)
        started = self._core.update(model, path, weights, rollback=rollback)
        return cast(UpdateResponse, self._ask(started, seconds, deadline))

    def reload(self, *, timeout: Optional[float] = None) -> ReloadResponse:
        """Have the daemon read its configuration file again; models that are new or changed load after the answer.

        Only the daemon's own user, and root, may do this.

        Raises:
            RequestError: as `infer`; `InvalidArgument` says what is wrong with the file, and nothing has changed.
        """
        seconds, deadline = self._begin(timeout)
        return cast(ReloadResponse, self._ask(self._core.reload(), seconds, deadline))

    def close(self) -> None:
        """Close the connection. Requests under way are given up. In a forked process it does nothing.

        Raises:
            WrongThread: another thread made the client.
        """
        if self._owner[0] != os.getpid() or self._closed:
            return
        self._check_owner()
        self._closed = True
        self._connection.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------
    #
    # Every call that is under way belongs to the connection there is: with a connection, all its calls end.

    def _begin(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Make sure that there is a connection; return the call's timeout and its deadline."""
        self._check_owner()
        seconds = self.timeout if timeout is None else _checked(timeout)
        deadline = time.monotonic() + seconds
        # What has come since the last call is not left to pile up, and a loss shows before a request is lost to it.
        while not (self._connection.closed or self._connection.quiet) and self._take_in(0.0):
            pass
        if self._connection.closed:
            self._hang_up(Unavailable, f"the connection to {self.address} was lost")
            self._connection = connect(self._context, self.address, deadline)
        return seconds, deadline

    def _ask(self, started: Started, seconds: float, deadline: float) -> Answer:
        call, frames = started
        self._send(frames, deadline)
        return self._wait(call, deadline + _grace(seconds))

    def _send(self, frames: List[Any], deadline: float) -> None:
        try:
            self._connection.send(frames, deadline)
        except Unavailable as error:
            self._hang_up(Unavailable, str(error))
            raise

    def _wait(self, call: Call, deadline: float) -> Answer:
        self._check_owner()
        while not call.done:
            if not self._take_in(deadline):
                raise DeadlineExceeded(f"no answer from {self.address} in time: the daemon does not answer")
        return call.result()

    def _cancel(self, call: Call) -> None:
        if not self._poll(call):
            try:
                self._connection.tell(self._core.cancel(call), time.monotonic() + self.timeout)
            except Unavailable as error:
                self._hang_up(Unavailable, str(error))  # which ends the call, too

    def _poll(self, call: Call) -> bool:
        self._check_owner()
        while not call.done and self._take_in(0.0):
            pass
        return call.done

    def _take_in(self, deadline: float) -> bool:
        """Take in the next message, or the loss of the connection; return whether either came by the deadline."""
        try:
            frames = self._connection.receive(deadline)
            if frames is None:
                return False
            self._core.received(frames)
        except (Unavailable, RemoteProtocolError) as error:
            self._hang_up(type(error), str(error))
        return True

    def _hang_up(self, kind: Type[WeightdError], text: str) -> None:
        self._connection.close()
        self._core.fail_all(kind, text)

    def _check_owner(self) -> None:
        if self._owner != (os.getpid(), threading.get_ident()):
            raise WrongThread("this Client belongs to the thread that made it; make one Client for each thread")
        if self._closed:
            raise ClientClosed("this Client is closed")


def _checked(timeout: float) -> float:
    if not 0 < timeout <= _MAX_TIMEOUT_S:
        raise InvalidArgument(f"timeout: expected more than 0 and at most {_MAX_TIMEOUT_S:.0f} seconds, got {timeout}")
    return timeout


def _grace(timeout: float) -> float:
    """How much longer to wait for the daemon's own error at the deadline, which says more than the client could."""
    return min(0.1 * timeout, _MAX_GRACE_S)
