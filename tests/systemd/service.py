"""weightd.service, or an instance of weightd@.service, inside a manager: configuration, start and queries."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from testkit.waiting import until

from . import materials
from .image import HOME
from .manager import Manager
from .units import INSTALLED

Model = Mapping[str, object]

CLIENT = f"{HOME}/source/tests/systemd/client.py"
CLIENT_UID = 4242
STRANGER_UID = 4343
STOP_S = 60.0

MLP: Model = {"path": materials.MODEL, "workers": 2, "required": True}
DROP_IN = "test.conf"


@dataclass(frozen=True)
class Child:
    """A holder or a worker, by its pid inside the manager."""

    role: str
    pid: int
    state: str


class Weightd:
    """A weightd service of a manager, with its socket unit.

    Attributes:
        service, socket: names of the units.
        address: default address of its clients; also the path of the ZeroMQ socket.
        sockets: paths of its sockets for clients.
    """

    def __init__(self, manager: Manager, instance: str = "") -> None:
        self.manager = manager
        self.service = f"weightd@{instance}.service" if instance else "weightd.service"
        self.socket = self.service.replace(".service", ".socket")
        self._name = instance or "weightd"
        self.address = f"/run/weightd/{self._name}.sock"
        self.sockets = (self.address, f"{self.address}.unix")

    # --- actions of the operator

    def configure(self, models: Mapping[str, Model], daemon: Model | None = None) -> None:
        """Write the configuration file."""
        tables = {"daemon": daemon or {}, **{f"models.{name}": model for name, model in models.items()}}
        self.write_config("".join(table(name, keys) for name, keys in tables.items()))

    def write_config(self, text: str) -> None:
        """Write the text to the configuration file."""
        self.manager.write(f"/etc/weightd/{self._name}.toml", text)

    def drop_in(self, *lines: str) -> None:
        """Set lines of the section [Service] for this test; they replace earlier ones."""
        self.manager.write(f"{INSTALLED}/{self.service}.d/{DROP_IN}", "\n".join(["[Service]", *lines, ""]))
        self.manager.systemctl("daemon-reload")

    def start(self) -> None:
        self._do("start")

    def restart(self) -> None:
        self._do("restart")

    def stop(self) -> None:
        """Stop the service, and wait for processes that outlive the unit."""
        self.manager.systemctl("stop", self.service)
        until(lambda: not self.pids(), f"all processes of {self.service} exit", STOP_S)

    def _do(self, verb: str) -> None:
        done = self.manager.try_run(["systemctl", verb, self.service])
        assert done.returncode == 0, f"{done.stderr}\n{self.journal()}"

    def reset(self) -> None:
        """Restore the initial state: stopped, with an open socket and without a drop-in."""
        run = self.manager.try_run
        run(["systemctl", "stop", self.service, self.socket])
        if self.pids():
            run(["systemctl", "kill", "--signal=CONT", self.service])
            run(["systemctl", "kill", "--signal=KILL", self.service])
        until(lambda: not self.pids(), f"all processes of {self.service} exit", STOP_S)
        directory = self.manager.path(f"{INSTALLED}/{self.service}.d")
        if (directory / DROP_IN).exists():
            (directory / DROP_IN).unlink()
            run(["systemctl", "daemon-reload"])
        run(["systemctl", "reset-failed", self.service, self.socket])
        run(["journalctl", "--rotate"])
        run(["journalctl", "--vacuum-time=1ms"])
        self.configure({"mlp": MLP})
        self.manager.systemctl("start", self.socket)

    # --- views of the operator

    def show(self, name: str) -> str:
        """Return a property of the service."""
        return self.manager.show(self.service, name)

    @property
    def main_pid(self) -> int:
        """The pid of the daemon inside the manager."""
        return int(self.show("MainPID"))

    @property
    def restarts(self) -> int:
        """The number of automatic restarts by systemd."""
        return int(self.show("NRestarts"))

    def pids(self) -> Sequence[int]:
        """Return the processes of the service's cgroup."""
        return self.manager.pids(self.service)

    def journal(self) -> str:
        """Return the journal of the service, including systemd's messages about it."""
        return self.manager.journal(self.service)

    def weightctl(self, *arguments: str, uid: int = 0) -> subprocess.CompletedProcess[str]:
        """Run weightctl."""
        return self.manager.try_run(["weightctl", "--socket", self.address, *arguments], uid, uid)

    def status(self) -> Mapping[str, Any]:
        """Return the status that weightctl prints; its exit status may report models that do not serve."""
        done = self.weightctl("--json", "status")
        assert done.stdout, done.stderr
        return cast("Mapping[str, Any]", json.loads(done.stdout))

    def generation(self, model: str = "mlp") -> Mapping[str, Any]:
        """Return the latest generation of a model."""
        model_status = next(each for each in self.status()["models"] if each["name"] == model)
        return cast("Mapping[str, Any]", model_status["generations"][-1])

    def children(self, model: str = "mlp") -> Sequence[Child]:
        """Return holder and workers of a model's latest generation."""
        processes = self.generation(model)["processes"]
        return [Child(each["role"], each["pid"], each["state"]) for each in processes]

    def workers(self, model: str = "mlp") -> Sequence[int]:
        """Return the pids of the workers that are READY."""
        return sorted(each.pid for each in self.children(model) if each.role == "worker" and each.state == "ready")

    def wait_for_workers(self, count: int = 2, model: str = "mlp") -> Sequence[int]:
        """Wait until this many workers are READY; return their pids."""

        def ready() -> Sequence[int]:
            workers = self.workers(model)
            return workers if len(workers) == count else ()

        return until(ready, f"{count} workers are READY")

    # --- clients

    def client(
        self, verb: str, *arguments: str, uid: int = CLIENT_UID, member: bool = True, scheme: str = ""
    ) -> subprocess.Popen[str]:
        """Start a client process of a user in the sockets' group, or not in it; scheme "ipc://" selects ZeroMQ."""
        groups = [self.clients_gid] if member else []
        command = [self.manager.python, CLIENT, verb, scheme + self.address, *arguments]
        return self.manager.popen(command, uid, uid, groups)

    @property
    def clients_gid(self) -> int:
        """The group whose members may connect."""
        return int(self.manager.run(["getent", "group", "weightd-clients"]).split(":")[2])

    def report(
        self, verb: str, *arguments: str, uid: int = CLIENT_UID, member: bool = True, scheme: str = ""
    ) -> Mapping[str, Any]:
        """Run a client until it exits; return its report."""
        return ended(self.client(verb, *arguments, uid=uid, member=member, scheme=scheme))

    def ask(self, file: str = materials.QUESTIONS, model: str = "mlp") -> None:
        """Send each request; every answer must be right."""
        report = self.report("ask", file, model)
        assert report.get("wrong") == 0, f"{report}\n{self.journal()}"


def ended(process: subprocess.Popen[str]) -> Mapping[str, Any]:
    """Close the input of a client, wait for it, and return its report, the last line of its output."""
    try:
        output, errors = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return cast("Mapping[str, Any]", json.loads(output.splitlines()[-1]))


def begun(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Wait until a client has received its first answer."""
    assert process.stdout
    line = process.stdout.readline()
    assert line.strip() == "begun", f"{line}{process.communicate()}"
    return process


def table(name: str, keys: Model) -> str:
    """Format a table; strings, numbers and booleans look the same in TOML and JSON."""
    return "\n".join(_lines(name, keys)) + "\n"


def _lines(name: str, table: Model) -> Iterator[str]:
    yield f"[{name}]"
    for key, value in table.items():
        yield f"{key} = {json.dumps(value)}"
