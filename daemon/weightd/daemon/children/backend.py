"""The daemon's side towards its children: their processes, their socket, and whose they are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from weightd.daemon.children.files import GenerationFiles, Seal, SnapshotFiles, seal
from weightd.daemon.children.keeper.link import LOG, Child
from weightd.daemon.config import canary as canary_config
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.continuity.keeping import Keeping
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.generation import Generation
from weightd.daemon.generations.plan import Source
from weightd.daemon.generations.records import SealRecord
from weightd.daemon.host import cgroup, processes
from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.ends import Coroner, End
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.memory import MIB
from weightd.daemon.host.processes import Process
from weightd.daemon.host.sockets import BATCH, Received, bind, peer_pid, receive, send
from weightd.daemon.models.budget import Device
from weightd.daemon.models.model import Model
from weightd.daemon.models.ports import Snapshot
from weightd.daemon.models.records import ModelRecord
from weightd.protocol import limits
from weightd.protocol.codec import clip, decode, encode
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.messages.children import FROM_CHILD, Broken, ChildMessage, Hello, OrderMessage

# weightd, or what it brings along.
_MISSING_MODULE = re.compile(r"No module named '(weightd|zmq|msgpack|numpy)")
_PINNED = re.compile(r"(?P<sha256>[0-9a-f]{64}) (?P<nbytes>[0-9]+)$")

_log = logging.getLogger("weightd")


class Backend:
    """Starts, hears, orders, kills and reaps children, and tells their models what becomes of them.

    Args:
        context: for the socket.
        config: where sockets and files are.
        loop: calls when something is readable.
        devices: by name; what a card has is learned before the first model is loaded there.
        keeper: parent of holders and workers; without one they are this process's children.

    Attributes:
        processes: every child that runs, by name.
        files: the files of each generation, by its label.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: Loop,
        devices: Mapping[str, Device],
        keeper: Keeping | None = None,
    ) -> None:
        self.processes: dict[str, Process] = {}
        self.files: dict[str, GenerationFiles] = {}
        self._seals: dict[str, Seal] = {}
        self._coroner = Coroner(_oom_kills)
        self._config = config
        self._loop = loop
        self._devices = devices
        self._keeper = keeper
        self._has_changed = False
        # By routing id, which is the name in bytes.
        self._owners: dict[bytes, tuple[str, Model]] = {}
        # What could not be done at once is told to its model after the actions that ordered it.
        self._later: list[Callable[[float], None]] = []
        # For children of the daemon before this one, which are not connected yet: they get them when they are heard.
        self._held: dict[str, list[tuple[OrderMessage, Sequence[Any]]]] = {}
        # Cards that have been asked what they have, if in vain.
        self._probed: set[str] = set()
        self._address = f"ipc://{config.children_socket}"
        self._socket = bind(context, self._address)
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

    def changed(self) -> None:
        """Something has changed that the next daemon would have to know."""
        self._has_changed = True

    def take_changed(self) -> bool:
        """Return whether something has, since this was asked last."""
        changed, self._has_changed = self._has_changed, False
        return changed

    def resume(self, model: Model, generation: Generation, seal: SealRecord | None) -> bool:
        """Take over the children of a generation that a daemon before this one has loaded."""
        files = self.files[generation.label] = GenerationFiles(self._config.private_dir / generation.label)
        self.exported(generation)
        if self._keeper is None:
            return False
        there = {child.name: child for child in self._keeper.children()}
        if self.seal(generation) != seal:
            for name in generation.children.keys() & there.keys():
                self._end_stray(self._keeper, there[name])
            self.forget(generation)
            return False
        for name in generation.children:
            try:
                process = self._keeper.watch(there[name])
            except (KeyError, OSError):
                end = End(None, "it ended while no daemon was there")
                self._later.append(functools.partial(model.exited, name, end))
            else:
                self._watch(name, process, functools.partial(self._on_exit, name))
                self._owners[name.encode()] = name, model
                self._held[name] = []
        count = len(generation.children)
        text = "%s: taken over from the daemon before, %d processes, %s"
        _log.info(text, generation.label, count, files.directory, extra=generation.about())
        return True

    def tidy(self, records: Iterable[ModelRecord]) -> None:
        """Remove what the daemon before this one has left and has not recorded: processes, and their files."""
        if self._keeper is None:
            return
        generations = {f"{model.name}.{each.number}": each for model in records for each in model.generations}
        known = {child.name for each in generations.values() for child in each.children}
        for child in self._keeper.children():
            if child.name not in known:
                self._end_stray(self._keeper, child)
        snapshots = (f"{model.name}.v{source.number}.snapshot" for model in records for source in model.sources)
        used = {self._keeper.handover.name, LOG, *generations, *snapshots}
        for path in self._config.private_dir.iterdir():
            if path.name not in used:
                shutil.rmtree(path, ignore_errors=True)

    def pin(self, model: Model, source: Source) -> None:
        """Start the process that takes the snapshot."""
        files = SnapshotFiles(self._config.private_dir / _snapshot_name(model, source))
        argv = [sys.executable, "-m", "weightd.daemon.children.snapshot", str(os.getpid()), source.path]
        argv += [str(files.model_dir), *([source.weights, str(files.weights)] if source.weights else [])]
        sample = canary_config.sample(model.config.canary)
        argv += [sample, str(files.sample)] if sample else []
        name = _snapshot_name(model, source)
        try:
            files.create()
            self._start(name, argv, files.log, functools.partial(self._on_pinned, model, source, files))
        except (ClaimError, OSError) as error:
            self._later.append(functools.partial(model.pin_failed, source, f"cannot take a snapshot: {error}"))

    def unpin(self, model: Model, source: Source) -> None:
        """Remove the snapshot, or stop taking it."""
        name = _snapshot_name(model, source)
        probes = [each for each in self.processes if each.startswith(f"{name}.")]
        for each in [name, *probes]:
            self.kill(each)
        if name not in self.processes:
            SnapshotFiles(self._config.private_dir / name).remove()

    def forget(self, generation: Generation) -> None:
        """Remove the files of a generation of which nothing is left."""
        files = self.files.pop(generation.label, None)
        if files is not None:
            files.remove()
        sealed = self._seals.pop(generation.label, None)
        if sealed is not None:
            sealed.close()

    def exported(self, generation: Generation) -> None:
        """Remember what the holder has left in the page store, if it has one."""
        files = self.files.get(generation.label)
        sealed = seal(files.store) if files is not None and generation.label not in self._seals else None
        if sealed is not None:
            self._seals[generation.label] = sealed

    def intact(self, generation: Generation) -> bool:
        """Return whether the page store of the generation, if it has one, is still what it was then."""
        sealed = self._seals.get(generation.label)
        return sealed is None or sealed.intact()

    def seal(self, generation: Generation) -> SealRecord | None:
        """Return what the page store of the generation was when it was exported, if it has one."""
        sealed = self._seals.get(generation.label)
        return SealRecord(*sealed.value) if sealed is not None else None

    def lives(self, name: str) -> bool:
        """Return whether a child has not begun to exit: asked of the kernel, before its death is told."""
        return name in self.processes and processes.lives(self.processes[name])

    def spawn(self, model: Model, generation: Generation, snapshot: Snapshot, name: str, role: Role) -> None:
        """Start a holder or a worker: one program for both, the orders it gets make the difference."""
        files = self.files.get(generation.label)
        config = model.config
        argv = [config.python, "-m", "weightd.worker"]
        argv += ["--address", self._address]
        argv += ["--name", name, "--role", role.value, "--engine", config.engine]
        argv += ["--model", snapshot.path, "--threads", str(config.threads), "--device", generation.device]
        if not generation.limits.sharing:
            argv += ["--sharing", "off"]
        if config.options != type(config.options)():
            argv += ["--options", config.options.json()]
        if snapshot.weights:
            argv += ["--weights", snapshot.weights]
        if canary_config.sample(config.canary):
            taken = SnapshotFiles(self._config.private_dir / _snapshot_name(model, generation.source))
            argv += ["--sample", str(taken.sample)]
        if config.canary_tolerance:
            argv += ["--tolerance", repr(config.canary_tolerance)]
        try:
            if files is None:
                files = self.files[generation.label] = GenerationFiles(self._config.private_dir / generation.label)
                files.create()
            argv += ["--store", str(files.store)]
            self._watch(name, self._start_child(name, argv, files), functools.partial(self._on_exit, name))
        except ClaimError as error:
            self._later.append(functools.partial(model.exited, name, End(None, str(error))))
            return
        except OSError as error:
            # The interpreter, or the log, a full disk, no descriptors left: the file tells which.
            where = "" if error.filename in (None, config.python) else f": {error.filename}"
            cause = f"cannot start {config.python}: {error.strerror or error}{where}"
            self._later.append(functools.partial(model.exited, name, End(None, cause)))
            return
        self._owners[name.encode()] = name, model

    def order(self, name: str, order: OrderMessage, frames: Sequence[Any] = ()) -> None:
        """Send an order to a child; one that cannot be reached is dying, and its pidfd will tell."""
        if name in self._held:
            self._held[name].append((order, frames))
        else:
            send(self._socket, name.encode(), [encode(order, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames])

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; its exit is told as any other."""
        if name in self.processes:
            self._coroner.signalled(name)
            processes.kill(self.processes[name], signal.SIGABRT if abort else signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill every child."""
        for process in self.processes.values():
            processes.kill(process)

    # --- within -------------------------------------------------------------------------------------------------

    def _start(self, name: str, argv: Sequence[str], log: Path, on_exit: Callable[[], None]) -> None:
        self._watch(name, processes.start(argv, log), on_exit)

    def _start_child(self, name: str, argv: Sequence[str], files: GenerationFiles) -> Process:
        if self._keeper is None:
            return processes.start([*argv, "--parent", str(os.getpid())], files.log(name))
        # The /tmp of a service that has PrivateTmp= is removed when it is restarted: these live on.
        environment = {**os.environ, "TMPDIR": str(files.directory)}
        return self._keeper.start(name, argv, files.log(name), environment)

    def _watch(self, name: str, process: Process, on_exit: Callable[[], None]) -> None:
        self.processes[name] = process
        self._loop.add(process.pidfd, on_exit)

    def _end(self, name: str) -> End:
        """Reap a child that has exited; return how it has ended."""
        process = self.processes.pop(name)
        self._loop.remove(process.pidfd)
        return self._coroner.end(name, processes.reap(process), processes.last_words(process))

    def _on_messages(self) -> int:
        """Read a batch of messages; return how many there were."""
        now = time.monotonic()
        count = 0
        for received in receive(self._socket):
            count += 1
            owner = self._owners.get(received.peer)
            if owner is not None:
                name, model = owner
                for order, frames in self._held.pop(name, ()):
                    self.order(name, order, frames)
                model.heard(name, self._decode(name, received), received.frames[1:], now)
        return count

    def _decode(self, name: str, received: Received) -> ChildMessage:
        try:
            message: ChildMessage = decode(received.frames, FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
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
        end = self._end(name)
        self._held.pop(name, None)
        _, model = self._owners.pop(name.encode())
        if _MISSING_MODULE.search(end.words):
            hint = f"install weightd there: {model.config.python} -m pip install weightd"
            end = dataclasses.replace(end, words=f"{end.words}; {hint}")
        model.exited(name, end, time.monotonic())

    def _end_stray(self, keeper: Keeping, child: Child) -> None:
        with contextlib.suppress(OSError):
            process = keeper.watch(child)
            processes.kill(process)
            self._watch(f"{child.name} ({child.pid})", process, functools.partial(self._on_stray, child))

    def _on_stray(self, child: Child) -> None:
        self._end(f"{child.name} ({child.pid})")

    def _on_pinned(self, model: Model, source: Source, files: SnapshotFiles) -> None:
        end = self._end(_snapshot_name(model, source))
        found = _PINNED.search(end.words)
        if end.status != 0 or found is None:
            files.remove()
            model.pin_failed(source, end.words or f"the snapshot {end.how}", time.monotonic())
            return
        weights = str(files.weights) if source.weights else ""
        path = str(files.model_dir / Path(source.path).name)
        self._probe(model, source, Snapshot(path, weights, found["sha256"], int(found["nbytes"])), files.log)

    # --- what a card has ----------------------------------------------------------------------------------------

    def _probe(self, model: Model, source: Source, snapshot: Snapshot, log: Path) -> None:
        """Ask each card of the model of which nothing is known; then the snapshot is told."""
        unknown = (each.device for each in model.deployments if self._is_unknown(each.device))
        device = next(unknown, None)
        if device is None:
            model.pinned(source, snapshot, time.monotonic())
            return
        self._probed.add(device.name)
        name = f"{_snapshot_name(model, source)}.{device.name}"
        argv = [model.config.python, "-m", "weightd.worker.probe", "--device", device.name]
        argv += ["--parent", str(os.getpid())]
        on_exit = functools.partial(
            self._on_probed, name, device, functools.partial(self._probe, model, source, snapshot, log)
        )
        try:
            self._start(name, argv, log, on_exit)
        except OSError as error:
            _log.warning("%s: cannot be asked for its memory: %s", device.name, error.strerror)
            self._later.append(lambda _: self._probe(model, source, snapshot, log))

    def _is_unknown(self, device: Device) -> bool:
        return device.name != "cpu" and device.capacity is None and device.name not in self._probed

    def _on_probed(self, name: str, device: Device, go_on: Callable[[], None]) -> None:
        end = self._end(name)
        try:
            device.capacity = device.said = int(json.loads(end.words[end.words.rindex("{") :])["free_bytes"])
            _log.info("%s: %d MiB are free", device.name, device.capacity // MIB)
        except (ValueError, KeyError, TypeError):
            _log.warning("%s: cannot be asked for its memory: %s", device.name, end.words or end.how)
        go_on()


def _oom_kills() -> int:
    limit = cgroup.memory()
    return limit.oom_kills or 0 if limit is not None else 0


def _snapshot_name(model: Model, source: Source) -> str:
    return f"{model.name}.v{source.number}.snapshot"
