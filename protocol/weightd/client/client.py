"""The blocking client."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Any, Dict, List, Mapping, Optional, Type, cast

import zmq

from weightd.client import address as addresses
from weightd.client.core import Answer, ClientCore
from weightd.protocol import limits
from weightd.protocol.errors import DeadlineExceeded, WeightdError
from weightd.protocol.messages import ModelMetadataResponse, ServerMetadataResponse, StatusResponse

DEFAULT_TIMEOUT_S = 30.0

# The daemon ends a request at its deadline with an error of its own, which says more than the client could: wait a
# little longer for it.
_GRACE_S = 0.5

# Below this, copying a frame costs less than tracking it.
_ZERO_COPY_BYTES = 64 * 1024


class WrongThread(WeightdError):
    """A Client is used by another thread or process than the one that made it. Make one for each: they are cheap."""


class Pending:
    """A request under way. Its answer is fetched with `result`, in any order."""

    def __init__(self, client: Client, request_id: str, deadline: float) -> None:
        self._client = client
        self._request_id = request_id
        self._deadline = deadline

    def done(self) -> bool:
        """Whether the answer has come; never waits."""
        return self._client._poll(self._request_id)  # noqa: SLF001

    def result(self) -> Dict[str, Any]:
        """Wait for the answer until the deadline that `submit` was given; once.

        Returns:
            The outputs by name: numpy arrays, read-only.

        Raises:
            RequestError: the request ended in an error; one subclass for each code of the wire.
        """
        return cast(Dict[str, Any], self._client._wait(self._request_id, self._deadline))  # noqa: SLF001


class Client:
    """Asks a weightd daemon for inference.

    For one thread: use by another is a `WrongThread` error. Use it as a context manager, or `close` it.

    Args:
        address: where the daemon listens, ipc:///PATH or tcp://HOST:PORT. Default: where it listens by default.
        timeout: seconds that a call waits unless it says otherwise.

    Raises:
        InvalidArgument: `address` is none.
        PermissionDenied: this user may not connect.
        Unavailable: nobody listens there.
    """

    def __init__(self, address: Optional[str] = None, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        self.address = addresses.default_address() if address is None else address
        self.timeout = timeout
        addresses.check(self.address)
        self._owner = (os.getpid(), threading.get_ident())
        self._core = ClientCore()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        self._socket.connect(self.address)

    def infer(self, model: str, inputs: Mapping[str, Any], *, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Run `model` on `inputs` and return its outputs.

        Args:
            model: the model's name in the daemon's configuration.
            inputs: an array for each input, by name; anything that `numpy.asarray` takes. Datatype, rank and fixed
                dimensions must be the model's (see `metadata`): nothing is converted in silence.
            timeout: seconds to wait; the client's where it is None.

        Returns:
            The outputs by name: numpy arrays, read-only.

        Raises:
            RequestError: one subclass for each code of the wire, `DeadlineExceeded` among them.
        """
        return self.submit(model, inputs, timeout=timeout).result()

    def submit(self, model: str, inputs: Mapping[str, Any], *, timeout: Optional[float] = None) -> Pending:
        """Send a request without waiting; many may be under way at once.

        The arrays must not be changed before the answer has come: large ones are not copied.
        Arguments and errors as for `infer`.
        """
        self._check_owner()
        seconds = self._seconds(timeout)
        request_id, frames = self._core.infer(model, inputs, seconds)
        deadline = self._send(frames, request_id, seconds)
        return Pending(self, request_id, deadline)

    def metadata(self, model: str, *, timeout: Optional[float] = None) -> ModelMetadataResponse:
        """Return what the model takes and gives. Waits while it loads.

        Raises:
            RequestError: as `infer`.
        """
        self._check_owner()
        return cast(ModelMetadataResponse, self._call(*self._core.model_metadata(model), timeout=timeout))

    def server(self, *, timeout: Optional[float] = None) -> ServerMetadataResponse:
        """Return the daemon's version and the names of its models.

        Raises:
            RequestError: as `infer`.
        """
        self._check_owner()
        return cast(ServerMetadataResponse, self._call(*self._core.server_metadata(), timeout=timeout))

    def status(self, *, timeout: Optional[float] = None) -> StatusResponse:
        """Return what the daemon is doing: models, generations, processes and their memory.

        Raises:
            RequestError: as `infer`.
        """
        self._check_owner()
        return cast(StatusResponse, self._call(*self._core.status(), timeout=timeout))

    def close(self) -> None:
        """Close the connection. Requests under way are given up."""
        if self._owner[0] == os.getpid():
            self._context.destroy(linger=0)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _call(self, request_id: str, frames: List[Any], *, timeout: Optional[float]) -> Answer:
        return self._wait(request_id, self._send(frames, request_id, self._seconds(timeout)))

    def _seconds(self, timeout: Optional[float]) -> float:
        return self.timeout if timeout is None else timeout

    def _send(self, frames: List[Any], request_id: str, seconds: float) -> float:
        """Send, and return the deadline. A daemon that reads nothing for so long ends the wait too."""
        deadline = time.monotonic() + seconds
        if not self._socket.poll(self._milliseconds(deadline), zmq.POLLOUT):
            self._core.forget(request_id)
            raise DeadlineExceeded(f"could not send within {seconds:g} s: the daemon does not read")
        copy = all(len(frame) < _ZERO_COPY_BYTES for frame in frames)
        self._socket.send_multipart(frames, copy=copy)
        return deadline

    def _wait(self, request_id: str, deadline: float) -> Answer:
        self._check_owner()
        while not self._core.answered(request_id):
            if not self._socket.poll(self._milliseconds(deadline + _GRACE_S)):
                self._core.forget(request_id)
                raise DeadlineExceeded(f"no answer from {self.address} by the deadline")
            self._core.received(self._socket.recv_multipart())
        return self._core.take(request_id)

    def _poll(self, request_id: str) -> bool:
        self._check_owner()
        while not self._core.answered(request_id) and self._socket.poll(0):
            self._core.received(self._socket.recv_multipart())
        return self._core.answered(request_id)

    @staticmethod
    def _milliseconds(deadline: float) -> int:
        return max(0, int((deadline - time.monotonic()) * 1000) + 1)

    def _check_owner(self) -> None:
        if self._owner != (os.getpid(), threading.get_ident()):
            raise WrongThread("this Client belongs to the thread that made it; make one Client for each thread")
