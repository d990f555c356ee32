"""Calls under way: `PendingCall` as the transport has it, `Pending` as the caller has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, List, NoReturn, Optional, Type

from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.types import DaemonMessage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weightd.shm_tensors import Lease


class NotCopyable(WeightdError, TypeError):
    """A client, a model of a client or a request under way was to be copied or pickled."""


class Uncopied:
    """Base of classes whose instances refuse `copy.copy`, `copy.deepcopy` and `pickle`."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: `copy` and `pickle` both call this.

        Raises:
            NotCopyable: always.
        """
        raise NotCopyable(
            f"{type(self).__name__} objects cannot be copied or pickled: each belongs to a connection of its process. "
            "Threads share a client; another process creates its own, with the address"
        )


class PendingCall:
    """A question under way and, in the end, its answer.

    Attributes:
        id: the request's id on the wire.
        response_type: the type of the message that answers it.
        done: whether it has ended, in an answer or in an error.
        request: what an inference request asks, as its `infer` message has it; None for any other.
        lease: what is in shared memory of it.
    """

    _result: Any

    __slots__ = ("__weakref__", "_callbacks", "_error", "_result", "done", "id", "lease", "request", "response_type")

    def __init__(self, request_id: str, expects: Type[DaemonMessage], request: Optional[Infer] = None) -> None:
        self.id = request_id
        self.response_type = expects
        self.request = request
        self.done = False
        self.lease: Optional[Lease] = None
        self._error: Optional[WeightdError] = None
        self._callbacks: List[Callable[[], None]] = []

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once the call has ended: at once if it has."""
        self._callbacks.append(callback)
        if self.done:
            self._run_callbacks()

    def result(self) -> Any:
        """Return the answer of a call that is done: what it expects, or the outputs of an inference request by name.

        Raises:
            RequestError: the request ended in an error.
            RemoteProtocolError: it was answered by what breaks the protocol.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def succeed(self, answer: Any) -> None:
        """End the call in an answer."""
        self._result = answer
        # Whoever keeps the error keeps the call: not its arrays, too.
        self.lease = None
        self.done = True
        if self._callbacks:
            self._run_callbacks()

    def fail(self, error: WeightdError) -> None:
        """End the call in an error."""
        self._error = error
        self.succeed(None)

    def _run_callbacks(self) -> None:
        # Another thread may do the same: each hook is taken by one of them.
        while self._callbacks:
            try:
                hook = self._callbacks.pop()
            except IndexError:
                return
            hook()


class Pending(Uncopied):
    """A request under way. Its answer is fetched with `result`, in any order; without a Pending, it is dropped."""

    __slots__ = ("_cancel", "_poll", "_wait")

    def __init__(
        self, wait: Callable[[], Dict[str, Any]], poll: Callable[[], bool], cancel: Callable[[], None]
    ) -> None:
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

    def result(self) -> Dict[str, NDArray[Any]]:
        """Wait for the answer until the deadline that `submit` was given.

        Returns:
            The outputs by name: numpy arrays, read-only.

        Raises:
            RequestError: the request ended in an error; one subclass for each code of the wire.
        """
        return self._wait()
