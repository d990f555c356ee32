"""What is being forked: of which process, and until when that may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.processes.spec import ProcessSpec

_NEVER = float("inf")


class ForkRequest(NamedTuple):
    """A child that a process has been asked for.

    Attributes:
        process_spec: what it is to be.
        parent: of which process it is forked.
        deadline: by when that has to have answered, in monotonic seconds.
        on_failure: called with the launch, and why there is no such child, if it does not come.
    """

    process_spec: ProcessSpec
    parent: str
    deadline: float
    on_failure: Callable[[ProcessSpec, str], object]


class PendingForks:
    """The children that processes have been asked for and have not answered yet, by name."""

    def __init__(self) -> None:
        self._pending: dict[str, ForkRequest] = {}
        # Who has been asked for one that is wanted no more, by its name: the answer comes all the same.
        self._cancelled: dict[str, str] = {}

    def add(self, request: ForkRequest) -> None:
        """A process is asked for a child."""
        self._pending[request.process_spec.name] = request

    def parents(self) -> list[str]:
        """Return every process that has not answered."""
        return list(dict.fromkeys(each.parent for each in self._pending.values()))

    def is_awaited(self, parent: str) -> bool:
        """Whether a process has not answered all that it was asked, be that wanted or not."""
        return parent in self._cancelled.values() or parent in self.parents()

    def complete(self, name: str, parent: str) -> ForkRequest | None:
        """A process has answered; return what it was asked for, None if that is wanted no more.

        Raises:
            LookupError: it was not asked for that.
        """
        request = self._pending.get(name)
        if request is not None and request.parent == parent:
            return self._pending.pop(name)
        if self._cancelled.get(name) != parent:
            raise LookupError(name)
        del self._cancelled[name]
        return None

    def cancel(self, name: str) -> bool:
        """A child is wanted no more; return whether it was being forked."""
        request = self._pending.pop(name, None)
        if request is not None:
            self._cancelled[name] = request.parent
        return request is not None

    def drop_parent(self, parent: str) -> list[ForkRequest]:
        """A process has ended; return what it has not answered."""
        self._cancelled = {name: each for name, each in self._cancelled.items() if each != parent}
        dropped = [each for each in self._pending.values() if each.parent == parent]
        for each in dropped:
            del self._pending[each.process_spec.name]
        return dropped

    def overdue_parents(self, now: float) -> list[str]:
        """Return every process that should have answered by now."""
        return list(dict.fromkeys(each.parent for each in self._pending.values() if each.deadline <= now))

    @property
    def next_deadline(self) -> float:
        """Nothing is overdue before this."""
        return min((each.deadline for each in self._pending.values()), default=_NEVER)
