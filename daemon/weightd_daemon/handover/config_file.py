"""The configuration file of a daemon, and what it said when it was last in force.

A service manager holds the latter for the next daemon. So a file that has become wrong, or names directories that
cannot be had, does not end a service that is restarted, nor what it holds in memory: the next daemon goes on with what
was in force, and says so until a reload succeeds. Where nobody holds it, as at the first start, a wrong file ends the
start.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from weightd_daemon.config.load import Config, ConfigError, load_text, read_text
from weightd_daemon.handover.config_reader import ReadConfig
from weightd_daemon.handover.instance_lock import check_directories
from weightd_daemon.handover.systemd import CLIENTS, CONFIG, ServiceManager
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses

_log = logging.getLogger("weightd")


class ConfigFile:
    """Reads the file at `path`.

    Args:
        path: of the file, absolute.
        manager: holds what is in force; its sockets are where clients connect.

    Attributes:
        path: as given.
        listen_addresses: addresses where the service manager listens for clients.
        note: why what is in force is not what the file says; "" if it is.
    """

    def __init__(self, path: Path, manager: ServiceManager) -> None:
        self.path = path
        self.note = ""
        self._manager = manager
        self.listen_addresses = listen_addresses(manager.inherited.get(CLIENTS, []))
        self._descriptors = manager.inherited.get(CONFIG, [])
        self._text = ""

    def load_initial(self) -> Config:
        """Return the configuration to start with: the file's, or what was in force before if that cannot be.

        Raises:
            ConfigError: the file is wrong, and nothing was in force before that still can be.
            PathInUse: the same of its directories.
        """
        try:
            config = self.read()
            if self._descriptors:
                check_directories(config.daemon)
            return config
        except (ConfigError, PathInUse) as error:
            before = self._load_previous()
            if before is None:
                raise
            self.note = f"{error}\nwhat was in force before is served"
            for problem in str(error).splitlines():
                _log.error("%s", problem)
            _log.error("%s is not in force: going on with what was in force before", self.path)
            return before

    def read(self) -> Config:
        """Return what the file says now.

        Raises:
            ConfigError: it is wrong.
        """
        text = read_text(self.path)
        config = load_text(text, self.path, self.listen_addresses)
        self._text = text
        return config

    def accept(self, result: ReadConfig) -> Config:
        """Return what was read of the file.

        Raises:
            ConfigError: it is wrong.
        """
        if result.config is None:
            raise ConfigError(*result.problems)
        self._text = result.text
        return result.config

    def mark_in_force(self) -> None:
        """What was read last is what is served: the next daemon may fall back on it."""
        content = self._text.encode()
        try:
            if not self._descriptors:
                self._descriptors = [os.memfd_create("weightd-config", os.MFD_CLOEXEC)]
                self._manager.store_descriptor(CONFIG, self._descriptors[0])
            os.pwrite(self._descriptors[0], content, 0)
            os.ftruncate(self._descriptors[0], len(content))
        except OSError as error:
            _log.warning("the configuration is not held for the next daemon: %s", error.strerror)

    def _load_previous(self) -> Config | None:
        for descriptor in self._descriptors[:1]:
            text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")
            try:
                config = load_text(text, self.path, self.listen_addresses)
            except ConfigError:  # of a version of weightd that knew other keys
                return None
            self._text = text
            return config
        return None
