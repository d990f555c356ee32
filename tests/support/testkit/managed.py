"""A daemon under a service manager, with socket activation, notifications and stored file descriptors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, List, Optional

from testkit.manager import Manager
from testkit.service import Service

_LIMIT_S = 60.0


class ManagedService(Service):
    """A `Service` that can be restarted while its processes go on, as under systemd."""

    def __enter__(self) -> ManagedService:
        self._manager: Optional[Manager] = None
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        try:
            super().__exit__(*arguments)
        finally:
            self.manager.close()

    @property
    def manager(self) -> Manager:
        """The service manager that has started the daemon."""
        if self._manager is None:
            self._manager = Manager(Path(self.address), self._runtime / "notify")
        return self._manager

    def restart(self, number: int) -> int:
        """Send a signal to the daemon, start the next one once it has exited, and return the exit status."""
        os.kill(self.pid, number)
        status = self.wait()
        self.start_again()
        return status

    def wait(self) -> int:
        """Wait until the daemon exits, and return its exit status."""
        status = self._process.wait(_LIMIT_S)
        self._log.finish()
        self.manager.drain_notifications()
        return status

    def start_again(self) -> None:
        """Start the next daemon."""
        self._launch(self.config)

    def _popen(self, command: List[str]) -> subprocess.Popen[str]:
        return self.manager.popen(command, self._env, stderr=subprocess.PIPE, text=True)
