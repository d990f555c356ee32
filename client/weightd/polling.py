"""`select.poll`, also in programs in which eventlet has replaced it.

`eventlet.monkey_patch` removes `select.poll`, before or after this module is imported, and replaces `select.select` by
a function that lets other green threads run while it waits.
"""

from __future__ import annotations

import select
from typing import Any, Dict, List, Sequence, Tuple

import zmq

READ, WRITE = int(select.POLLIN), int(select.POLLOUT)


def new_poller(descriptors: Sequence[int]) -> Any:
    """Return an object with the methods of `select.poll` that waits until one of `descriptors` can be read."""
    poller: Any = select.poll() if hasattr(select, "poll") else SelectPoller()
    for descriptor in descriptors:
        poller.register(descriptor, READ)
    return poller


class SelectPoller:
    """The methods of `select.poll` that the client calls, by `select.select`."""

    def __init__(self) -> None:
        self._events: Dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Wait for these events of a descriptor from now on: `READ`, `WRITE` or both."""
        self._events[descriptor] = events

    modify = register

    def poll(self, milliseconds: float) -> List[Tuple[int, int]]:
        """Wait for so long at most; return the descriptors that are ready, each with an event."""
        readable = [each for each, events in self._events.items() if events & READ]
        writable = [each for each, events in self._events.items() if events & WRITE]
        if milliseconds > 0:
            to_read, to_write, _ = select.select(readable, writable, [], milliseconds / 1000)
        else:
            # eventlet's `select` switches to other green threads even if it does not wait, and refuses a descriptor
            # that one of them waits for.
            ready = zmq.zmq_poll(
                [*((each, zmq.POLLIN) for each in readable), *((each, zmq.POLLOUT) for each in writable)], 0
            )
            to_read = [each for each, event in ready if event & zmq.POLLIN]
            to_write = [each for each, event in ready if event & zmq.POLLOUT]
        return [*((each, READ) for each in to_read), *((each, WRITE) for each in to_write)]
