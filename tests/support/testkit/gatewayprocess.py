"""A gateway process, started by the command that operators use: `weightd gateway CONFIG`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from testkit.service import Log, toml

LIMIT_S = 30.0

_SERVING = re.compile(r"serving at (\S+) 127\.0\.0\.1:(\d+)")


class GatewayProcess:
    """A gateway that serves within the block. At the end of the block it must exit with status 0.

    Args:
        directory: directory of the configuration file.
        daemon: address of the daemon.
        tables: tables of the configuration. Without any, every local client has access.

    Attributes:
        pid: pid of the gateway.
        config: path of the configuration file.
    """

    def __init__(self, directory: Path, daemon: str, tables: Mapping[str, Mapping[str, object]] | None = None) -> None:
        given = dict(tables or {})
        ports = {"http": ["127.0.0.1:0"], "grpc": ["127.0.0.1:0"]}
        given["gateway"] = {"daemon": daemon, **ports, "anonymous": "-", **given.get("gateway", {})}
        self.config = directory / "gateway.toml"
        self.config.write_text(toml(given), "utf-8")

    def __enter__(self) -> GatewayProcess:
        command = [sys.executable, "-m", "weightd_daemon", "gateway", str(self.config)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.pid: int = self._process.pid
        assert self._process.stderr
        self._log = Log(self._process.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        status = self.stop()
        if kind is not None:
            print(f"the log of the gateway:\n{self.log}", file=sys.stderr)
        else:
            assert status == 0, self.log

    @property
    def log(self) -> str:
        """The text that the gateway has logged."""
        return "".join(self._log.lines)

    def port(self, protocol: str) -> int:
        """Wait until the gateway serves a protocol, and return the port."""
        while True:
            seen = len(self._log.lines)
            for found, port in _SERVING.findall(self.log):
                if found == protocol:
                    return int(port)
            if not self._log.wait_beyond(seen, time.monotonic() + LIMIT_S):
                raise RuntimeError(f"the gateway does not serve {protocol}:\n{self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the gateway, and return its exit status."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait until the gateway exits, and return its exit status; kill it after the limit."""
        try:
            status = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._log.finish()
        return status
