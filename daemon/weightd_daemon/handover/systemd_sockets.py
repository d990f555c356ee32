"""Where clients connect: the sockets that a service manager has passed, and those that nobody has opened yet."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.config import addresses as forms
from weightd_daemon.config.load import Config
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses, listen_on

_log = logging.getLogger("weightd")


class ListenSockets(NamedTuple):
    """Sockets that listen and do not block.

    Attributes:
        unix_listeners: for clients of this host; none where that could not be had.
        zmq_listeners: for clients that speak ZeroMQ, by the names of their listeners.
        addresses: of all of them.
        metrics_listener: for those who want metrics; None where there is to be none.
    """

    unix_listeners: Sequence[socket.socket]
    zmq_listeners: Mapping[str, socket.socket]
    addresses: Sequence[str]
    metrics_listener: socket.socket | None = None


@contextlib.contextmanager
def listen(config: Config, passed: Sequence[int], *, with_unix: bool = True) -> Generator[ListenSockets, None, None]:
    """Listen within the block wherever the configuration says, and leave no path behind but those of others.

    Args:
        config: complete, made for what was passed.
        passed: descriptors that a service manager has passed; they are closed in the end.
        with_unix: whether clients of this host may connect without ZeroMQ.

    Raises:
        PathInUse: a socket cannot be had.
    """
    with contextlib.ExitStack() as stack:
        passed_listeners = _adopt_passed(passed, stack)
        unix_listeners = {address: each for address, each in passed_listeners.items() if address.startswith("unix://")}
        if with_unix and not unix_listeners:
            unix_listeners = _listen_unix(f"unix://{config.daemon.unix_socket}", stack, is_required=not passed)
        zmq_listeners = {
            name: passed_listeners.get(each.address) or stack.enter_context(listen_on(each.address))
            for name, each in config.listeners.items()
        }
        metrics = config.daemon.metrics
        metrics_listener = stack.enter_context(listen_on(forms.metrics_listen_address(metrics))) if metrics else None
        all_addresses = [*unix_listeners, *(each.address for each in config.listeners.values())]
        yield ListenSockets([*unix_listeners.values()], zmq_listeners, all_addresses, metrics_listener)


def _adopt_passed(passed: Sequence[int], stack: contextlib.ExitStack) -> dict[str, socket.socket]:
    found: dict[str, socket.socket] = {}
    for address, descriptor in zip(listen_addresses(passed), passed, strict=True):
        found[address] = stack.enter_context(socket.socket(fileno=descriptor))
        # Whoever else accepts from it, in this process or another one, may have been faster.
        found[address].setblocking(False)
    return found


def _listen_unix(address: str, stack: contextlib.ExitStack, *, is_required: bool) -> dict[str, socket.socket]:
    """Listen for clients of this host; where a service manager listens for others they can do without it."""
    try:
        return {address: stack.enter_context(listen_on(address))}
    except PathInUse as error:
        if is_required:
            raise
        _log.warning("clients of this host have to speak ZeroMQ, which is slower: %s; see weightd.socket", error)
        return {}
