"""Process of `users.User`: `python -m testkit.users_child DESCRIPTOR UID GROUPS MODULE...`."""

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

# Imported before the process drops root, as it may not read root's files afterwards.
_TRANSPORTS = (weightd.transport_zmq,)

# An order: its kind and arguments.
Order = Tuple[Any, ...]


class ProcessContext:
    """Context of a function in the process of a user.

    Attributes:
        address: address of the daemon.
        options: options of the client.
        stopping: event that is set when the function has to return.
        report: sends an object to `User.wait_for_report`.
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.address = ""
        self.options: dict[str, Any] = {}
        self.stopping = threading.Event()
        self.report = tell
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        """The client of the process."""
        assert self._client, "it is not connected"
        return self._client

    def connect(self, address: str, options: dict[str, Any]) -> None:
        """Replace the client by a client of `address`."""
        if self._client is not None:
            self._client.close()
        self.address, self.options = address, options
        self._client = Client(address, **options)

    def another(self) -> Client:
        """Return another client of the same daemon; the caller closes it."""
        return Client(self.address, **self.options)


def main() -> None:
    """Become the user, and execute orders."""
    descriptor, uid, groups, *modules = sys.argv[1:]
    # Import the functions of orders now; the process cannot read root's files later.
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
    except Exception as error:  # noqa: BLE001 - the test receives every error
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
