"""A Ray cluster of several nodes on this machine, for tests in the environment with Ray. Its end removes everything."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Set before the import of Ray: Ray sends no usage reports and listens on the loopback interface only.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_DISABLE_IMPORT_WARNING="1",
    RAY_enable_metrics_collection="0",
    RAY_SERVE_LOG_TO_STDERR="0",
)

import ray
from ray import serve
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from testkit.census import families
from testkit.waiting import until

# All nodes and this process use the loopback address; otherwise Ray assumes that the other nodes cannot reach it.
ray_constants.ENABLE_RAY_CLUSTER = False
_ADDRESS = "127.0.0.1"

# Size of each node's object store. Ray accepts no less than about 75 MB.
STORE_BYTES = 100 * 1024 * 1024

# Enough cores for a replica's daemon. Nodes may declare more cores than the machine has.
CORES = 4

# Ray detects a dead node within seconds instead of a minute.
_SYSTEM = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}

_REQUEST_S = 20.0


class Nodes:
    """A cluster whose head has Serve's proxy, and by default no cores for replicas.

    Args:
        directory: directory of Ray's files. Its path must be short, because Ray has sockets there.
        count: number of nodes including the head.
        request_timeout: timeout of Serve's proxy, in seconds.

    Attributes:
        directory: directory of Ray's files.
        http: port of the proxy.
        base: directory of the files of replicas.
    """

    def __init__(self, directory: Path, count: int = 1, request_timeout: float = _REQUEST_S) -> None:
        self.directory = directory
        self.base = directory / "w"
        self.http = _free_port()
        self._applications: dict[str, Mapping[str, Any]] = {}
        # Ray's files, and the file that names the cluster of this machine.
        (directory / "ray").mkdir()
        os.environ["RAY_TMPDIR"] = str(directory)
        self._args = {"num_cpus": CORES, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **self._args,
                "include_dashboard": False,
                "node_ip_address": _ADDRESS,
                "_system_config": {**_SYSTEM},  # a copy, because Ray modifies the dictionary
            },
            shutdown_at_exit=True,
        )
        self.workers = [self.add() for _ in range(count - 1)]
        ray.init(address=self._cluster.address, log_to_driver=False, namespace="tests")
        options = {"host": _ADDRESS, "port": self.http, "request_timeout_s": request_timeout}
        serve.start(proxy_location="HeadOnly", http_options=options)

    def add(self) -> Any:
        """Add a node, and return it."""
        return self._cluster.add_node(node_ip_address=_ADDRESS, **self._args)

    def kill(self, node: Any) -> list[int]:
        """Kill a node and its descendants at once; return their pids."""
        (process,) = node.all_processes["raylet"]
        killed = families([process.process.pid])
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self.workers.remove(node)
        return killed

    def deploy(self, *applications: Mapping[str, Any]) -> None:
        """Add these applications to the others, as a YAML file of Serve does. Does not wait until they run."""
        self._applications.update({each["name"]: each for each in applications})
        self._apply()

    def delete(self, name: str) -> None:
        """Delete an application."""
        del self._applications[name]
        self._apply()
        until(lambda: name not in serve.status().applications, f"{name} is gone", 60)

    def _apply(self) -> None:
        from ray.serve import context
        from ray.serve.schema import ServeDeploySchema

        client: Any = getattr(context, "_get_global_client")()  # noqa: B009 - Serve has no other way
        client.deploy_apps(
            ServeDeploySchema.model_validate({"applications": [*self._applications.values()]}), _blocking=False
        )

    def application(
        self, name: str, arguments: Mapping[str, Any], prefix: str = "", **deployment: Any
    ) -> Mapping[str, Any]:
        """Return an application in the form of Serve's YAML file."""
        return {
            "name": name,
            "import_path": "weightd_ray:app",
            "route_prefix": prefix or f"/{name}",
            "args": arguments if "address" in arguments else {"directory": str(self.base), **arguments},
            "deployments": [{"name": "weightd", **deployment}],
        }

    def run(self, *applications: Mapping[str, Any], limit: float = 180.0) -> None:
        """Deploy these applications, and wait until they run."""
        self.deploy(*applications)
        for each in applications:
            count = each["deployments"][0].get("num_replicas", 1)
            until(functools.partial(self._has, each["name"], count), f"{each['name']} runs", limit)

    def _has(self, name: str, count: int) -> bool:
        return self.running(name) == count

    def running(self, name: str) -> int:
        """Return the number of running replicas of an application, or -1 until it is in the requested state."""
        application = serve.status().applications.get(name)
        if application is None or application.status.value != "RUNNING":
            if application is not None and application.status.value == "DEPLOY_FAILED":
                raise RuntimeError(application.message)
            return -1
        states = application.deployments["weightd"].replica_states
        return states.get("RUNNING", 0) if set(states) == {"RUNNING"} else -1

    def pids(self, what: str) -> list[int]:
        """Return the pids whose command line contains `what` and the directory of this cluster's replicas."""
        return [pid for pid, command in _commands() if what in command and str(self.base) in command]

    def replicas(self, application: str) -> list[int]:
        """Return the pids of the replicas of an application."""
        return [pid for pid, command in _commands() if command.startswith(f"ray::ServeReplica:{application}:")]

    def supervisors(self, application: str) -> list[int]:
        """Return the pids of the supervisors that the replicas of an application started."""
        held = {name for pid in self.replicas(application) for name in _descriptors(pid)}
        return [pid for pid in self.pids("weightd_ray.daemon_supervisor") if _descriptors(pid, "0") & held]

    def left(self) -> Sequence[str]:
        """Return the remaining processes and temporary files of replicas."""
        files = [str(each) for each in (self.base / "work").glob("*")]
        return [*(f"{pid}: {command}" for pid, command in _commands() if str(self.base) in command), *files]

    def close(self) -> None:
        """Stop the cluster."""
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def nodes(count: int = 1, **options: Any) -> Generator[Nodes]:
    """Run a cluster within the block; its end removes all processes and files."""
    directory = Path(tempfile.mkdtemp(prefix="wr-", dir="/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, directory)
        stack.callback(_kill, directory)
        # Always shut down: Ray exits a program whose cluster has gone without a shutdown.
        stack.callback(ray.shutdown)
        made = Nodes(directory, count, **options)
        try:
            yield made
        finally:
            made.close()
        until(lambda: not made.left(), f"replicas leave nothing: {made.left()}", 60)
        until(lambda: not _of(directory), f"Ray leaves no process: {_of(directory)}", 60)


def _kill(directory: Path) -> None:
    """Kill the remaining processes of a failed test."""
    for pid, _ in _of(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _remove(directory: Path) -> None:
    """Remove the directory, to whose log threads of Ray in this process may still write."""

    def is_gone() -> bool:
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()

    until(is_gone, f"{directory} can be removed")


def _of(directory: Path) -> list[tuple[int, str]]:
    return [(pid, command) for pid, command in _commands() if str(directory) in command]


def _commands() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if command:
                    found.append((int(entry.name), command))
    return found


def _descriptors(pid: int, which: str = "*") -> set[str]:
    """Return the pipes and files that descriptors of a process refer to."""
    found: set[str] = set()
    for each in Path(f"/proc/{pid}/fd").glob(which):
        with contextlib.suppress(OSError):
            found.add(str(each.readlink()))
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_ADDRESS, 0))
        port: int = found.getsockname()[1]
        return port
