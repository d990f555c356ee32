"""The service manager, as far as the gateway has to do with one: it is nobody's parent, and keeps nothing."""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping

from weightd_common import service_manager

_log = logging.getLogger("weightd.gateway")


class ServiceManager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it.

    Attributes:
        sockets: those that listen already.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.sockets = [socket.socket(fileno=each) for each, _ in service_manager.take_listen_fds(environment)]

    def notify(self, *assignments: str) -> None:
        """Tell it something, such as "READY=1"; where that cannot be, the log has it."""
        if not self._address:
            return
        try:
            service_manager.send(self._address, "\n".join(assignments))
        except OSError as error:
            _log.warning("the service manager cannot be told %s: %s", assignments[0], error)

    def notify_reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        self.notify(*service_manager.reloading_message())
