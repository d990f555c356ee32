"""A real gateway in a process of its own, started as an operator would: `weightd gateway CONFIG`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, List

from testkit.waiting import until

LIMIT_S = 60.0

_SERVING = re.compile(r"serving at (\w+) (\S+)")


class GatewayProcess:
    """Serves the daemon at an address within the block; `settings` are of the table [gateway].

    Attributes:
        places: where callers connect, by protocol, in the order of the configuration.
        process: the gateway's.
        log: the lines that it has logged.
    """

    def __init__(self, daemon: str, **settings: Any) -> None:
        given = {"daemon": daemon, "http": [], "grpc": ["127.0.0.1:0"], "anonymous": "-", **settings}
        # Texts, numbers, booleans and lists of them are the same in JSON and in TOML.
        self._config = "[gateway]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
        self._wanted = len(given["http"]) + len(given["grpc"])
        self.places: Dict[str, List[str]] = {}
        self.log: List[str] = []

    def __enter__(self) -> GatewayProcess:
        self._directory = tempfile.TemporaryDirectory(prefix="weightd-", dir="/tmp")
        config = Path(self._directory.name, "gateway.toml")
        config.write_text(self._config)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightd.gateway", str(config)], stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until(lambda: self._is_serving() or self.process.poll() is not None, "the gateway to serve", LIMIT_S)
        assert self._is_serving(), self.log
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._directory.cleanup()

    def stop(self) -> int:
        """End it as a service manager does; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(LIMIT_S)

    def _is_serving(self) -> bool:
        return sum(map(len, self.places.values())) == self._wanted

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip())
                told = _SERVING.search(line)
                if told is not None:
                    self.places.setdefault(told.group(1), []).append(told.group(2))
