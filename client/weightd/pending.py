"""A request under way, as its sender holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict

from weightd.copying import Uncopied

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
