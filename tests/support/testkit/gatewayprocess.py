"""A real gateway, started as an operator would: `weightd gateway CONFIG`."""

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
    """Serves within the block; it ends with status 0 at the end of it.

    Args:
        directory: where its configuration is.
        daemon: the address of the daemon.
        tables: of the configuration; without any, whoever is on this host may ask.

    Attributes:
        pid: its pid.
        config: its configuration file.
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
        """What it logged so far."""
        return "".join(self._log.lines)

    def port(self, protocol: str) -> int:
        """Wait until it serves a protocol, and return the port."""
        while True:
            seen = len(self._log.lines)
            for found, port in _SERVING.findall(self.log):
                if found == protocol:
                    return int(port)
            if not self._log.wait_beyond(seen, time.monotonic() + LIMIT_S):
                raise RuntimeError(f"the gateway does not serve {protocol}:\n{self.log}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its status."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and return its status; one that takes too long is killed."""
        try:
            status = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._log.finish()
        return status
