"""`python -m testkit.users_child DESCRIPTOR UID GROUPS MODULE...`: the process of `users.User`."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, Callable, Tuple

import weightd.transport_zmq
from weightd import Client

# Imported now: afterwards it may read no file of root's.
_TRANSPORTS = (weightd.transport_zmq,)

# An order: what to do, and with what.
Order = Tuple[Any, ...]


class ProcessContext:
    """What a function has that a user's process runs.

    Attributes:
        address: of whom it is connected to.
        options: of its client.
        stopping: set when it is to end.
        report: sends something to `User.heard`.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.address = ""
        self.options: dict[str, Any] = {}
        self.stopping = threading.Event()
        self.report = tell
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """Its client."""
        assert self._client, "it is not connected"
        return self._client

    def connect(self, address: str, options: dict[str, Any]) -> None:
        """Connect, instead of wherever it is connected."""
        if self._client is not None:
            self._client.close()
        self.address, self.options = address, options
        self._client = Client(address, **options)

    def another(self) -> Client:
        """Return one more client of the same daemon, to be closed by the caller."""
        return Client(self.address, **self.options)


def main() -> None:
    """Become the user, and do what comes."""
    descriptor, uid, groups, *modules = sys.argv[1:]
    # What it is ordered to run is found by name when it can read nothing of root's any more.
    for each in ("testkit.loads", *modules):
        importlib.import_module(each)
    os.setgroups([int(each) for each in groups.split(",") if each])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    pipe = Connection(int(descriptor))
    hands = ProcessContext(lambda value: pipe.send(("report", value)))
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, hands, orders), daemon=True).start()
    hands.report(os.getresuid())
    while True:
        pipe.send(_answer(hands, orders.get()))
        hands.stopping.clear()


def _read(pipe: Connection, hands: ProcessContext, orders: queue.Queue[Order]) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            order = pipe.recv()
            if order == ("stop",):
                hands.stopping.set()
            else:
                orders.put(order)
    os._exit(0)


def _answer(hands: ProcessContext, order: Order) -> tuple[str, Any]:
    try:
        return "result", _done(hands, *order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the one who ordered has it
        return "error", error


def _done(hands: ProcessContext, kind: str, what: Any, *rest: Any) -> Any:
    if kind == "connect":
        return hands.connect(what, *rest)
    if kind == "ask":
        args, kwargs = rest
        return getattr(hands.client, what)(*args, **kwargs)
    (args,) = rest
    return what(hands, *args)


if __name__ == "__main__":
    main()
