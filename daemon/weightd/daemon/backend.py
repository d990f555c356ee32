"""The daemon's side towards its children: their processes, their socket, and whose they are."""

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from weightd.daemon import processes
from weightd.daemon.actions import Role
from weightd.daemon.claim import ClaimError
from weightd.daemon.config import DaemonConfig
from weightd.daemon.files import GenerationFiles
from weightd.daemon.loop import Loop
from weightd.daemon.model import Model
from weightd.daemon.processes import Process
from weightd.daemon.sockets import BATCH, Received, bind, peer_pid, receive, send
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.wire import clip, decode, encode
from weightd.protocol.worker_messages import FROM_CHILD, Broken, ChildMessage, Hello, OrderMessage

# weightd, or what it brings along.
_MISSING_MODULE = re.compile(r"No module named '(weightd|zmq|msgpack|numpy)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Backend:
    """Starts, hears, orders, kills and reaps children, and tells their models what becomes of them.

    Attributes:
        processes: every child that runs, by name.
        files: the files of each generation, by its label.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: DaemonConfig, loop: Loop) -> None:
        self.processes: dict[str, Process] = {}
        self.files: dict[str, GenerationFiles] = {}
        self._config = config
        self._loop = loop
        # By routing id, which is the name in bytes.
        self._owners: dict[bytes, tuple[str, Model]] = {}
        # What could not be done at once is told to its model after the actions that ordered it.
        self._later: list[Callable[[float], None]] = []
        self._address = f"ipc://{config.children_socket}"
        self._socket = bind(context, self._address, clients=False)
        loop.add(self._socket, self._on_messages)

    @property
    def due(self) -> bool:
        """Whether `tick` has something to tell."""
        return bool(self._later)

    def tick(self, now: float) -> None:
        """Tell what could not be told at once."""
        later, self._later = self._later, []
        for tell in later:
            tell(now)

    def pin(self, model: Model) -> None:
        """Start the process that takes the snapshot."""
        path = Path(model.config.path)
        files = self.files[model.label] = GenerationFiles(self._config.private_dir / model.label, path.name)
        argv = [sys.executable, "-m", "weightd.daemon.snapshot", str(os.getpid()), str(path), str(files.snapshot_dir)]
        name = _snapshot_name(model)
        try:
            files.create()
            self._start(name, argv, files, functools.partial(self._on_pinned, model, name))
        except (ClaimError, OSError) as error:
            self._later.append(functools.partial(model.pin_failed, f"cannot take a snapshot: {error}"))

    def unpin(self, model: Model) -> None:
        """Stop taking the snapshot, if that is under way."""
        self.kill(_snapshot_name(model))

    def spawn(self, model: Model, name: str, role: Role) -> None:
        """Start a holder or a worker: one program for both, the orders it gets make the difference."""
        files = self.files[model.label]
        config = model.config
        argv = [config.python, "-m", "weightd.worker"]
        argv += ["--address", self._address]
        argv += ["--name", name, "--parent", str(os.getpid()), "--engine", config.engine]
        argv += ["--model", str(files.snapshot), "--store", str(files.store)]
        argv += ["--threads", str(config.threads), "--device", config.device]
        try:
            self._start(name, argv, files, functools.partial(self._on_exit, name))
        except OSError as error:
            cause = f"cannot start {config.python}: {error.strerror}"
            self._later.append(functools.partial(model.exited, name, cause))
            return
        self._owners[name.encode()] = name, model

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        """Send an order to a child; one that cannot be reached is dying, and its pidfd will tell."""
        send(self._socket, name.encode(), [encode(order), *frames])

    def kill(self, name: str) -> None:
        """Kill a child; its exit is told as any other."""
        if name in self.processes:
            processes.kill(self.processes[name])

    def kill_all(self) -> None:
        """Kill every child."""
        for process in self.processes.values():
            processes.kill(process)

    # --- within -------------------------------------------------------------------------------------------------

    def _start(self, name: str, argv: Sequence[str], files: GenerationFiles, on_exit: Callable[[], None]) -> None:
        process = self.processes[name] = processes.start(argv, files.log(name))
        self._loop.add(process.pidfd, on_exit)

    def _end(self, name: str) -> tuple[int, str]:
        """Reap a child that has exited; return its status and its last words."""
        process = self.processes.pop(name)
        self._loop.remove(process.pidfd)
        return processes.reap(process), processes.last_words(process)

    def _on_messages(self) -> int:
        """Read a batch of messages; return how many there were."""
        now = time.monotonic()
        count = 0
        for received in receive(self._socket):
            count += 1
            owner = self._owners.get(received.peer)
            if owner is not None:
                name, model = owner
                model.heard(name, self._decode(name, received), received.frames[1:], now)
        return count

    def _decode(self, name: str, received: Received) -> ChildMessage:
        try:
            message: ChildMessage = decode(received.frames, FROM_CHILD)
            if isinstance(message, Hello):
                self._check_pid(name, received)
        except RemoteProtocolError as error:
            return Broken(clip(f"it broke the protocol: {error}"))
        return message

    def _check_pid(self, name: str, received: Received) -> None:
        """The kernel knows who says HELLO: it must be the process that was started under that name."""
        pid = peer_pid(received.identity)
        if pid is not None and pid != self.processes[name].pid:
            raise RemoteProtocolError(f"hello: expected from pid {self.processes[name].pid}, got it from {pid}")

    def _on_exit(self, name: str) -> None:
        # What it said before it died counts: read it first, all of it.
        while self._on_messages() == BATCH:
            pass
        status, words = self._end(name)
        _, model = self._owners.pop(name.encode())
        how = processes.explain(status)
        if _MISSING_MODULE.search(words):
            words += f"; install weightd there: {model.config.python} -m pip install weightd"
        model.exited(name, f"{how}: {words}" if words else how, time.monotonic())

    def _on_pinned(self, model: Model, name: str) -> None:
        status, words = self._end(name)
        sha256 = words.rpartition(" ")[2]
        if status == 0 and _SHA256.fullmatch(sha256):
            model.pinned(sha256, time.monotonic())
        else:
            model.pin_failed(words or f"the snapshot {processes.explain(status)}", time.monotonic())


def _snapshot_name(model: Model) -> str:
    return f"{model.label}.snapshot"
