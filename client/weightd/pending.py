"""Calls in progress: `PendingCall` is used within the client, `Pending` by its users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, NoReturn, Optional, Type

from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.types import DaemonMessage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.shm_tensors import Lease


class NotCopyable(WeightdError, TypeError):
    """Raised on an attempt to copy or pickle a client, a model object of a client, or a pending request."""


class Uncopied:
    """Base of classes whose instances cannot be copied or pickled."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled. `copy.copy`, `copy.deepcopy` and `pickle` all call this method.

        Raises:
            NotCopyable: always.
        """
        raise NotCopyable(
            f"{type(self).__name__} objects cannot be copied or pickled: each belongs to a connection of its process. "
            "Share a client between threads; in another process create another client"
        )


class VersionOutputs(Dict[str, Any]):
    """Outputs by name of a request that named a model with several versions, but no version.

    Attributes:
        model: the name of the version that has answered, such as "resnet@2".
    """

    def __init__(self, outputs: Dict[str, Any], model: str) -> None:
        super().__init__(outputs)
        self.model = model


class PendingCall:
    """A call in progress, and its response or error once it has ended.

    Attributes:
        id: the id of the request, by which the protocol matches request and response.
        response_type: the type of the expected response message.
        done: whether the call has ended, with a response or with an error.
        request: the `Infer` message of an inference request; None for any other call.
        model: the name in a request for the signature of a model; "" for any other call.
        lease: the tensors of the request and the shared memory that they use; None if the call uses no shared memory or
            has ended.
        description_frame: the encoded description of a request that may be sent on a direct channel; None for any other
            call.
        channel: the direct channel on which the request was sent, as long as the answer is expected there.
        packet: the packet of the request, with which it can be sent again. It is kept until the call ends, or until the
            daemon has the request.
    """

    _result: Any

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_result",
        "channel",
        "description_frame",
        "done",
        "id",
        "lease",
        "model",
        "packet",
        "request",
        "response_type",
    )

    def __init__(self, request_id: str, expects: Type[DaemonMessage], request: Optional[Infer] = None) -> None:
        self.id = request_id
        self.response_type = expects
        self.request = request
        self.model = ""
        self.done = False
        self.lease: Optional[Lease] = None
        self.description_frame: Optional[bytes] = None
        self.channel: Optional[object] = None
        self.packet: Optional[bytes] = None
        self._error: Optional[WeightdError] = None
        self._callbacks: List[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the call ends. If the call has already ended, call `callback` at once."""
        self._callbacks.append(callback)
        if self.done:
            self._run_callbacks()

    def result(self) -> Any:
        """Return the response of a call that has ended; for an inference request, the outputs by name.

        Raises:
            RequestError: the request failed.
            RemoteProtocolError: the response violated the protocol.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def succeed(self, answer: Any) -> None:
        """End the call with a response."""
        self._result = answer
        # If the caller stores an exception, its traceback keeps this object alive. Drop the lease, so that the arrays
        # do not stay alive as well.
        self.lease = self.channel = self.packet = None
        self.done = True
        if self._callbacks:
            self._run_callbacks()

    def fail(self, error: WeightdError) -> None:
        """End the call with an error."""
        self._error = error
        self.succeed(None)

    def _run_callbacks(self) -> None:
        # Two threads may run this loop at the same time; `pop` gives each callback to only one of them.
        while self._callbacks:
            try:
                hook = self._callbacks.pop()
            except IndexError:
                return
            hook()


class Pending(Uncopied):
    """A request in progress. The results of several requests can be read in any order.

    If the caller drops the object, the client drops the response, too.
    """

    __slots__ = ("_cancel", "_poll", "_wait")

    def __init__(
        self, wait: Callable[[], Dict[str, Any]], poll: Callable[[], bool], cancel: Callable[[], None]
    ) -> None:
        self._wait = wait
        self._poll = poll
        self._cancel = cancel

    def done(self) -> bool:
        """Return whether the request has ended, with outputs or with an error. Never waits."""
        return self._poll()

    def cancel(self) -> None:
        """Cancel the request if it has not ended: `result` raises `Cancelled`.

        No worker starts the request, unless the client has sent it to the workers directly. If a response was sent
        before the daemon received the cancellation, `result` returns this response instead.

        Raises:
            DeadlineExceeded: the daemon does not read, so the client could not send the cancellation within its
                timeout.
        """
        self._cancel()

    def result(self) -> Dict[str, NDArray[Any]]:
        """Wait for the response until the deadline that `timeout` of `submit` has set.

        Returns:
            The outputs by name. They are read-only numpy arrays.

        Raises:
            RequestError: the request failed. Each error code of the protocol has a subclass.
        """
        return self._wait()
