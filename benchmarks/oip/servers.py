"""Servers of the Open Inference Protocol in separate processes: third-party servers and weightd's gateway."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from benchmarks.material import UnavailableError
from testkit.mindir import REPOSITORY
from testkit.ports import free_ports
from testkit.service import Service

MLSERVER = REPOSITORY / ".venv-rival-mlserver" / "bin" / "python"
PYTRITON = REPOSITORY / ".venv-rival-pytriton" / "bin" / "python"

_HERE = Path(__file__).parent
_LIMIT_S = 120.0
_LOOK_S = 0.05


class Server(NamedTuple):
    """Ports of a server on the loopback interface."""

    http: int
    grpc: int


# Serves models, given as file paths by name, with a number of workers.
Serve = Callable[[Mapping[str, Path], int], AbstractContextManager[Server]]


@contextlib.contextmanager
def mlserver(models: Mapping[str, Path], workers: int) -> Generator[Server, None, None]:
    """Run MLServer with `workers` worker processes; with 0, it runs models in its own process, which is faster."""
    server, metrics = _ports()
    with tempfile.TemporaryDirectory(prefix="mlserver-", dir="/tmp") as directory:
        settings = {
            "host": "127.0.0.1",
            "http_port": server.http,
            "grpc_port": server.grpc,
            "metrics_port": metrics,
            "metrics_dir": directory,
            "parallel_workers": workers,
        }
        Path(directory, "settings.json").write_text(json.dumps(settings), "utf-8")
        for name, path in models.items():
            Path(directory, name).mkdir()
            model = {"name": name, "implementation": "mlserver_runtime.Onnx", "parameters": {"uri": str(path)}}
            Path(directory, name, "model-settings.json").write_text(json.dumps(model), "utf-8")
        command = [str(MLSERVER.with_name("mlserver")), "start", directory]
        with _running("mlserver", MLSERVER, command, server, models, {"PYTHONPATH": str(_HERE)}):
            yield server


@contextlib.contextmanager
def pytriton(models: Mapping[str, Path], workers: int) -> Generator[Server, None, None]:
    """Run PyTriton, which runs each model in one process."""
    del workers
    server, metrics = _ports()
    ports = (server.http, server.grpc, metrics)
    command = [str(PYTRITON), "-I", str(_HERE / "pytriton_child.py"), *map(str, ports)]
    command += [f"{name}={path}" for name, path in models.items()]
    with _running("pytriton", PYTRITON, command, server, models):
        yield server


@contextlib.contextmanager
def weightd(models: Mapping[str, Path], workers: int) -> Generator[Server, None, None]:
    """Run the daemon and its gateway."""
    server, _ = _ports()
    tables = {name: {"path": path, "workers": workers} for name, path in models.items()}
    with Service(tables) as service, tempfile.TemporaryDirectory(prefix="gateway-", dir="/tmp") as directory:
        service.ready()
        config = Path(directory, "gateway.toml")
        config.write_text(
            f'[gateway]\ndaemon = "unix://{service.address}.unix"\nhttp = ["127.0.0.1:{server.http}"]\n'
            f'grpc = ["127.0.0.1:{server.grpc}"]\nanonymous = "-"\n',
            "utf-8",
        )
        command = [sys.executable, "-m", "weightd_gateway", str(config)]
        with _running("weightd gateway", Path(sys.executable), command, server, models):
            yield server


def _ports() -> tuple[Server, int]:
    http_port, grpc_port, metrics = free_ports(3)
    return Server(http_port, grpc_port), metrics


@contextlib.contextmanager
def _running(
    name: str,
    python: Path,
    command: Sequence[str],
    server: Server,
    models: Iterable[str],
    env: Mapping[str, str] | None = None,
) -> Generator[None, None, None]:
    """Start a server, wait until its models are ready, and stop it at the end of the block."""
    if not python.exists():
        raise UnavailableError(f"{name} is not installed in {python.parent.parent}; run `make bench-gateway`")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            limit = time.monotonic() + _LIMIT_S
            while not all(_is_ready(server.http, model) for model in models):
                if process.poll() is not None or time.monotonic() > limit:
                    log.seek(0)
                    raise UnavailableError(f"{name} does not serve:\n{log.read().decode('utf-8', 'replace')[-2000:]}")
                time.sleep(_LOOK_S)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_ready(port: int, model: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", f"/v2/models/{model}/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
