"""The daemon's side towards its children: their processes, their socket, and whose they are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import zmq

from weightd_common.transient import is_transient
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.platform import clock, processes
from weightd_daemon.platform.directories import PathInUse, make_directory
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.platform.zmq_sockets import (
    RECEIVE_BATCH_SIZE,
    ReceivedMessage,
    bind_router,
    peer_pid,
    receive_batch,
    send,
    watch_socket,
)
from weightd_daemon.processes import spec
from weightd_daemon.processes.channels import WorkerChannels
from weightd_daemon.processes.copy_progress import CopyProgress
from weightd_daemon.processes.device_probe import DeviceMemoryInfo, DeviceProbe
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.fork_coordinator import ForkCoordinator
from weightd_daemon.processes.fork_servers import FORK_TIMEOUT_S, ForkServer, ForkServers
from weightd_daemon.processes.launchers.direct import DirectLauncher
from weightd_daemon.processes.launchers.launcher import Launcher, SurvivingProcess
from weightd_daemon.processes.pending_forks import ForkRequest
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.snapshots import SnapshotService
from weightd_daemon.processes.spec import ProcessSpec, WorkerProgram
from weightd_daemon.processes.store_integrity import StoreIntegrity
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, clip, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    BeginBatch,
    CancelPredict,
    ChildMessage,
    ChildOrder,
    Fork,
    Forked,
    Hello,
    Predict,
    ProcessFailed,
    Reconnected,
    Stop,
)

# weightd, or what it brings along: Python says so on stderr alone. What follows from it is a word for people.
_MISSING_MODULE = re.compile(r"No module named '?(weightd|zmq|msgpack|numpy)")

# Of the frames of a message.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

# What a child hears in the order in which it is said, and answers in that.
_CHANNEL_ORDERS = frozenset((Fork, BeginBatch, Predict, CancelPredict))

_log = logging.getLogger("weightd")


class ProcessSupervisor:
    """Starts, hears, orders, kills and reaps children, and tells their owners what becomes of them.

    Args:
        context: for the socket.
        config: where sockets and files are.
        loop: calls when something is readable.
        devices: by name; what a card has is learned before the first model is loaded there.
        launcher: starts holders and workers, and what they are forked of; what else helps to start them are this
            process's children always.
        on_change: called when something has changed that the next daemon would have to know.

    Attributes:
        files: the files of each generation, by its label.
        is_store_intact: called with a generation; returns whether its page store, if it has one, is still what it was
            when it was exported.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: EventLoop,
        devices: Mapping[str, DeviceMemoryInfo],
        launcher: Launcher | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.files: dict[str, GenerationFiles] = {}
        self._process_table = ProcessTable(loop)
        self._store_integrity = StoreIntegrity()
        self.is_store_intact = self._store_integrity.is_intact
        self._directory = config.private_dir
        self._socket_paths = config.children_socket, config.channel_socket
        self._launcher = launcher or DirectLauncher()
        self._snapshot_service = SnapshotService(
            self._directory, self._process_table, DeviceProbe(self._process_table, devices), self._defer
        )
        self._decoder = Decoder(FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._loop = loop
        self._on_change = on_change
        self._has_changed = False
        # Whose each child is, by its name, from the moment in which it is wanted.
        self._event_handlers: dict[str, ProcessEventHandler] = {}
        # Who has a channel and nothing else: what was forked, and what processes are forked of.
        self._channel_only: set[str] = set()
        # With what each was started, unless that was by the daemon before this one.
        self._interpreters: dict[str, str] = {}
        # What could not be done at once is told to its owner after the actions that ordered it.
        self._deferred: list[Callable[[float], None]] = []
        # For children of the daemon before this one, which are not connected yet: they get them when they are heard.
        self._held_orders: dict[str, list[ChildOrder]] = {}
        # A child that finds the socket finds the channel.
        self._channels = WorkerChannels(
            config.channel_socket, loop, self._name_of, self._on_channel_message, self._on_channel_error
        )
        self._address = config.children_address
        self._socket = bind_router(context, self._address)
        self._schedule_receive = watch_socket(loop, self._socket, self._on_messages)
        self._fork_servers = ForkServers(
            self._directory, self._address, self._start_fork_server, self._process_table.kill
        )
        self._fork_coordinator = ForkCoordinator(
            self._launcher, loop, self.send_order, self._on_child_forked, self._kill_unwanted, self._process_table.kill
        )

    @property
    def processes(self) -> Mapping[str, ChildProcess]:
        """Every process that runs, by name."""
        return self._process_table.processes

    @property
    def fork_servers(self) -> Collection[ForkServer]:
        """Of which children are forked, or would be."""
        return self._fork_servers.servers.values()

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything here: what is left only serves to start more."""
        return not self._event_handlers and all(map(self._fork_servers.is_fork_server, self.processes))

    def on_message_burst(self, handler: Callable[[], object]) -> None:
        """Call `handler` before several messages are heard that a child has sent together."""
        self._channels.on_message_burst = handler

    def prepare_fork_servers(self, models: Iterable[ModelConfig]) -> None:
        """Have ready what these models will be forked of, and nothing else: it takes a while to load."""
        self._fork_servers.reconcile(models)

    def mark_changed(self) -> None:
        """Something has changed that the next daemon would have to know."""
        self._has_changed = True
        self._on_change()

    def take_changed(self) -> bool:
        """Return whether something has, since this was asked last."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    # --- what the daemon before this one has left -----------------------------------------------------------------

    def resume(
        self, event_handler: ProcessEventHandler, generation: GenerationBase, seal_record: SealRecord | None
    ) -> bool:
        """Take over the children of a generation that a daemon before this one has loaded."""
        files = self.files[generation.label] = self._files_of(generation)
        self.on_exported(generation)
        survivors = {kept.name: kept for kept in self._launcher.surviving_processes()}
        if self.seal_record(generation) != seal_record:
            for name in generation.children.keys() & survivors.keys():
                self._kill_leftover(survivors[name])
            self.remove_files(generation)
            return False
        for name in generation.children:
            try:
                process = self._launcher.watch(survivors[name])
            except (KeyError, OSError):
                end = ExitCause(None, "it ended while no daemon was there")
                self._defer(functools.partial(event_handler.on_exit, name, end))
            else:
                self._event_handlers[name] = event_handler
                self._watch(name, process)
                hello = generation.children[name].hello
                is_template = generation.attach_control.is_fork_only and generation.children[name].role is Role.HOLDER
                if is_template or (hello is not None and hello.origin != "spawned"):
                    self._channel_only.add(name)
                else:
                    self._held_orders[name] = []
        count = len(generation.children)
        text = "%s: taken over from the daemon before, %d processes, %s"
        _log.info(text, generation.label, count, files.directory, extra=generation.log_extra())
        return True

    def remove_leftovers(self, children: Collection[str], entries: Collection[str]) -> None:
        """Remove what the daemon before this one has left beside these.

        Args:
            children: by name.
            entries: of the private directory.
        """
        self._launcher.kill_orphans()
        for kept in self._launcher.surviving_processes():
            if kept.name not in children:
                self._kill_leftover(kept)
        for path in self._directory.iterdir():
            if path.name not in entries:
                shutil.rmtree(path, ignore_errors=True)

    # --- snapshots and generations --------------------------------------------------------------------------------

    def take_snapshot(
        self,
        event_handler: ProcessEventHandler,
        model: str,
        config: ModelConfig,
        source: ModelSource,
        expected_sha256: str = "",
    ) -> None:
        """Take the snapshot of a model's source; `expected_sha256`: the sha256 that it has to have, "" for any."""
        self._snapshot_service.take_snapshot(event_handler, model, config, source, expected_sha256)

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        """Remove the snapshot, or stop taking it."""
        self._snapshot_service.remove_snapshot(model, source)

    def copy_progress(self, model: str, source: ModelSource) -> CopyProgress | None:
        """Return how much of a source's snapshot was copied; None where nothing was, or it is not known."""
        return self._snapshot_service.copy_progress(model, source)

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation of which nothing is left."""
        files = self.files.pop(generation.label, None)
        if files is not None:
            files.remove()
        self._store_integrity.remove(generation.label)

    def on_exported(self, generation: GenerationBase) -> None:
        """Remember what the holder has left in the page store, if it has one."""
        files = self.files.get(generation.label)
        if files is not None:
            self._store_integrity.add(generation.label, files.store)

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return what the page store of the generation was when it was exported, if it has one."""
        return self._store_integrity.find(generation.label)

    # --- children -------------------------------------------------------------------------------------------------

    def spawn(
        self,
        event_handler: ProcessEventHandler,
        generation: GenerationBase,
        program: WorkerProgram,
        name: str,
        role: Role,
        template: str = "",
    ) -> None:
        """Start a holder or a worker: forked of `template`, if that is one, else of a fork server, if that can be."""
        self._event_handlers[name] = event_handler
        self._interpreters[name] = program.python
        try:
            files = self.files.setdefault(generation.label, self._files_of(generation))
            if not files.directory.is_dir():
                files.create(program.rank_table)
        except (PathInUse, OSError) as error:
            self._fail_start(name, str(error), transient=is_transient(error))
            return
        missing_socket = next((path for path in self._socket_paths if not path.exists()), None)
        if missing_socket is not None:
            self._fail_start(name, f"the socket where it would connect is gone: {missing_socket}; restart weightd")
            return
        # Whom a template is forked to has its model already.
        missing_file, cause = (MissingFile.NONE, "") if template else self._find_missing_file(generation, program, role)
        if missing_file is not MissingFile.NONE:
            self._fail_start(name, cause, transient=True, missing_file=missing_file)
            return
        process_spec = spec.child_spec(program, name, role, self._address, self.files[generation.label])
        if process_spec.is_channel_only or not program.spawn_reason:
            self._channel_only.add(name)
        server = None if program.spawn_reason else self._fork_servers.find(program)
        if template:
            self._fork_coordinator.fork(
                ForkRequest(process_spec, template, clock.now() + FORK_TIMEOUT_S, self._fail_fork)
            )
        elif server is not None and server.name:
            due = self._fork_servers.fork_deadline(server.name, has_channel=self._channels.is_open(server.name))
            self._fork_coordinator.fork(ForkRequest(process_spec, server.name, due, self._start))
        else:
            why = "no fork server is wanted for it any more" if server is None else server.reason
            self._start(process_spec, program.spawn_reason or why)

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child; one that cannot be reached is dying, and its pidfd will tell."""
        encoded = [*encode(order, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames]
        kind = order.__class__
        if kind in _CHANNEL_ORDERS or name in self._channel_only:
            if kind is BeginBatch:
                self._channels.cork(name)
            self._channels.send(name, encoded, regions)
        elif name in self._held_orders:
            self._held_orders[name].append(order)
        elif kind is Stop and self._channels.is_open_or_pending(name):
            # It stops when it has done what it was asked before.
            self._channels.send(name, encoded)
        else:
            send(self._socket, name.encode(), encoded)
            self._schedule_receive()

    def unmap(self, numbers: Iterable[int]) -> None:
        """Take memory of clients away from the workers that were given it: nothing will name it again."""
        for number in numbers:
            self._channels.unmap(number)

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit: asked of the kernel, before its death is told."""
        return self._process_table.is_alive(name)

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; its exit is told as any other."""
        if self._fork_coordinator.cancel(name):
            self._fail_start(name, "it was ended before it had been forked")
        self._process_table.kill(name, abort=abort)

    def kill_all(self) -> None:
        """Kill every child, and what they are forked of."""
        self._fork_servers.reconcile(())
        for name in [name for name in self._event_handlers if self._fork_coordinator.cancel(name)]:
            self._fail_start(name, "it was ended before it had been forked")
        self._process_table.kill_all()

    def close(self) -> None:
        """Close the channels."""
        self._channels.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _defer(self, callback: Callable[[float], None]) -> None:
        self._deferred.append(callback)
        self._loop.call_soon(self._run_deferred)

    def _run_deferred(self) -> None:
        callbacks, self._deferred = self._deferred, []
        now = clock.now()
        for callback in callbacks:
            callback(now)

    def _files_of(self, generation: GenerationBase) -> GenerationFiles:
        return GenerationFiles(self._directory / generation.label)

    def _watch(self, name: str, process: ChildProcess) -> None:
        self._process_table.add(name, process, functools.partial(self._on_exit, name))

    def _find_missing_file(
        self, generation: GenerationBase, program: WorkerProgram, role: Role
    ) -> tuple[MissingFile, str]:
        """Return which files are missing that a child needs, and that for people."""
        for path in filter(None, (program.model, program.weights, program.sample)):
            if not os.path.lexists(path):
                return MissingFile.SNAPSHOT, f"the copy of the model in the cache folder is gone: {path}"
        store = self.files[generation.label].store
        if (
            role is Role.WORKER
            and self._store_integrity.find(generation.label) is not None
            and not os.path.lexists(store)
        ):
            return MissingFile.STORE, f"the shared weights in the cache folder are gone: {store}"
        return MissingFile.NONE, ""

    def _fail_start(
        self, name: str, cause: str, *, transient: bool = False, missing_file: MissingFile = MissingFile.NONE
    ) -> None:
        """There will be no such child; `transient`: the cause may go away by itself."""
        event_handler = self._drop_child(name)
        exit_cause = ExitCause(
            None, with_limit_hint(cause), has_transient_start_failure=transient, missing_file=missing_file
        )
        self._defer(functools.partial(event_handler.on_exit, name, exit_cause))

    def _fail_fork(self, process_spec: ProcessSpec, why: str) -> None:
        self._fail_start(process_spec.name, f"it cannot be forked: {why}")

    def _start(self, process_spec: ProcessSpec, why: str) -> None:
        """Start a child that was not forked, for that reason."""
        if not process_spec.is_channel_only:
            self._channel_only.discard(process_spec.name)
        try:
            process = self._launcher.start(process_spec.with_origin_note(why))
        except OSError as error:
            # The interpreter, or the log, a full disk, no descriptors left: the file tells which.
            python = process_spec.command[0]
            where = "" if error.filename in (None, python) else f": {error.filename}"
            cause = f"cannot start {python}: {error.strerror or error}{where}"
            self._fail_start(process_spec.name, cause, transient=is_transient(error))
        else:
            self._watch(process_spec.name, process)

    def _start_fork_server(self, process_spec: ProcessSpec) -> None:
        name = process_spec.name
        self._channel_only.add(name)
        with contextlib.suppress(PathInUse):  # then it cannot be started, which says why
            make_directory(self._directory, mode=0o700)
        self._process_table.add(
            name, self._launcher.start(process_spec), functools.partial(self._on_fork_server_exit, name)
        )

    def _on_fork_server_exit(self, name: str) -> None:
        self._channels.read_all(name)
        self._channels.remove(name)
        self._channel_only.discard(name)
        self._fork_servers.on_exit(name, self._reap(name))
        self._fork_coordinator.on_parent_exit(name)

    def _on_child_forked(self, process_spec: ProcessSpec, parent: str, process: ChildProcess) -> None:
        self._fork_servers.on_child_forked(parent)
        self._watch(process_spec.name, process)

    def _kill_unwanted(self, name: str, process: ChildProcess) -> None:
        processes.kill(process)
        name = f"{name} ({process.pid})"
        self._process_table.add(name, process, functools.partial(self._process_table.reap, name))

    def _on_messages(self) -> int:
        """Read a batch of messages; return how many there were."""
        now = clock.now()
        count = 0
        for received in receive_batch(self._socket):
            count += 1
            # No name of ours has what stands for bytes that are no text.
            name = received.peer.decode(errors="replace")
            owner = self._event_handlers.get(name)
            if owner is not None:
                message = self._parse_message(name, received)
                if isinstance(message, Reconnected):
                    # It has connected its channel before it said so.
                    self._channels.accept()
                for order in self._held_orders.pop(name, ()):
                    self.send_order(name, order)
                owner.on_message(name, message, received.frames[_TENSOR_FRAMES], now)
        return count

    def _read_fork_replies(self) -> None:
        """Read what has been said of children that are being forked: it was sent before they could do anything."""
        for parent in self._fork_coordinator.parents():
            self._channels.read_all(parent)

    def _parse_message(self, name: str, received: ReceivedMessage) -> ChildMessage:
        try:
            message: ChildMessage = self._decoder.decode(received.frames)
        except RemoteProtocolError as error:
            return _protocol_failure(error)
        if isinstance(message, Forked):
            return _protocol_failure(RemoteProtocolError("forked: expected it on the channel"))
        if isinstance(message, Hello):
            # The kernel knows who says HELLO: it must be the process that was started under that name.
            pid, expected = peer_pid(received.identity), self._pid_of(name)
            if pid not in (None, expected):
                return _protocol_failure(RemoteProtocolError(f"hello: expected from pid {expected}, got it from {pid}"))
        if isinstance(message, ProcessFailed):
            return _with_limit_hint(message)
        return message

    def _pid_of(self, name: str) -> int | None:
        process = self.processes.get(name)
        return None if process is None else process.pid

    def _name_of(self, pid: int) -> str | None:
        self._read_fork_replies()
        return next((name for name, process in self.processes.items() if process.pid == pid), None)

    def _on_channel_message(self, name: str, frames: Sequence[Any]) -> None:
        try:
            message: ChildMessage = self._decoder.decode(frames)
            if isinstance(message, Forked):
                self._on_forked(name, message)
                return
            if isinstance(message, ProcessFailed):
                message = _with_limit_hint(message)
        except RemoteProtocolError as error:
            self._on_channel_error(name, error)
            return
        if name in self._event_handlers:
            self._event_handlers[name].on_message(name, message, frames[_TENSOR_FRAMES], clock.now())

    def _on_forked(self, name: str, forked: Forked) -> None:
        if any(process.pid == forked.pid for process in self.processes.values()):
            raise RemoteProtocolError(f"forked: expected a new process, got pid {forked.pid}")
        self._fork_coordinator.on_fork_reply(name, forked)

    def _on_channel_error(self, name: str, error: RemoteProtocolError) -> None:
        if name in self._event_handlers:
            self._event_handlers[name].on_message(name, _protocol_failure(error), (), clock.now())
        else:
            _log.warning("%s: it broke the protocol: %s", name, error)
            self._process_table.kill(name)

    def _on_exit(self, name: str) -> None:
        # What it said before it died counts: read it first, all of it.
        self._channels.read_all(name)
        while self._on_messages() == RECEIVE_BATCH_SIZE:
            pass
        self._schedule_receive()
        exit_cause = self._reap(name)
        python = self._interpreters.get(name, "")
        event_handler = self._drop_child(name)
        if python and _MISSING_MODULE.search(exit_cause.detail):
            hint = f"install weightd there: {python} -m pip install weightd"
            exit_cause = dataclasses.replace(exit_cause, detail=f"{exit_cause.detail}; {hint}")
        # First: whom it has not forked would be ended else for nothing.
        self._fork_coordinator.on_parent_exit(name)
        event_handler.on_exit(name, exit_cause, clock.now())

    def _reap(self, name: str) -> ExitCause:
        """Wait for a process that has exited, and for what it has forked and could not tell any more."""
        if self._fork_coordinator.is_awaited(name):
            pids = {process.pid for process in self.processes.values()}
            with contextlib.suppress(OSError):
                self._launcher.kill_orphans_of(self.processes[name].pid, pids)
        return self._process_table.reap(name)

    def _drop_child(self, name: str) -> ProcessEventHandler:
        self._channels.remove(name)
        self._held_orders.pop(name, None)
        self._interpreters.pop(name, None)
        self._channel_only.discard(name)
        return self._event_handlers.pop(name)

    def _kill_leftover(self, survivor: SurvivingProcess) -> None:
        with contextlib.suppress(OSError):
            self._kill_unwanted(survivor.name, self._launcher.watch(survivor))


def _with_limit_hint(broken: ProcessFailed) -> ProcessFailed:
    return dataclasses.replace(broken, reason=clip(with_limit_hint(broken.reason)))


def _protocol_failure(error: RemoteProtocolError) -> ProcessFailed:
    return ProcessFailed(clip(f"it broke the protocol: {error}"))
