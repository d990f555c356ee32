"""The process supervisor: starts, forks, kills and reaps the children of the daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping

import zmq

from weightd_common.transient import is_transient
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.directories import PathInUse, make_directory
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause, MissingFile
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes import spec
from weightd_daemon.processes.device_probe import DeviceMemoryInfo, DeviceProbe
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.processes.files import GenerationStorage
from weightd_daemon.processes.fork_coordinator import ForkCoordinator, ForkRequest, PendingForks
from weightd_daemon.processes.fork_servers import FORK_TIMEOUT_S, ForkServers
from weightd_daemon.processes.launcher import DirectLauncher, Launcher
from weightd_daemon.processes.messenger import ChildMessenger
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.snapshots import SnapshotService
from weightd_daemon.processes.spec import ProcessSpec, SurvivingProcess, WorkerProgram
from weightd_daemon.processes.worker_channels import OnDirectReport
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.channels import WatchWeights
from weightd_protocol.messages.worker import Forked

# Matches the text on stderr with which Python reports that weightd, or a dependency of weightd, is not installed.
_MISSING_MODULE = re.compile(r"No module named '?(weightd|zmq|msgpack|numpy)")

_log = logging.getLogger("weightd")


class ProcessSupervisor:
    """Starts, kills and reaps children, and passes the messages and the exit of each child to its event handler.

    The methods of this class never call an event handler before they return; the event loop calls it later.

    Args:
        context: the ZeroMQ context of the children's socket.
        config: the configuration, with the paths of sockets and files.
        loop: watches sockets and the exits of processes.
        devices: all devices by name. The memory of a card is queried before the first model is loaded on it.
        launcher: starts holders, workers and fork servers. One-shot helpers are always children of the daemon itself.
        on_change: called when the content of the state file for the next daemon has changed.
        on_message_burst: called before several messages from one child are handled in a row.
        on_direct_report: called with the name of a child, a message about a direct channel, and its frames.

    Attributes:
        storage: the files of the generations.
        snapshots: takes and removes snapshots of models.
        messenger: sends orders to children and receives their messages.
        fork_servers: the fork servers for the loaded models.
    """

    def __init__(  # noqa: PLR0913
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: EventLoop,
        devices: Mapping[str, DeviceMemoryInfo],
        launcher: Launcher | None = None,
        *,
        on_change: Callable[[], object] = lambda: None,
        on_message_burst: Callable[[], object] = lambda: None,
        on_direct_report: OnDirectReport = lambda name, message, frames: None,
    ) -> None:
        self._directory = config.private_dir
        self._loop = loop
        self._launcher = launcher or DirectLauncher()
        self._on_change = on_change
        self._has_changed = False
        self._process_table = ProcessTable(loop)
        self._pending_forks = PendingForks()
        # The path of the interpreter of each child that this daemon has started, by the name of the child.
        self._interpreters: dict[str, str] = {}
        self.storage = GenerationStorage(self._directory)
        self.snapshots = SnapshotService(
            self._directory, self._process_table, DeviceProbe(self._process_table, devices), self._defer
        )
        self.messenger = ChildMessenger(
            context,
            config,
            loop,
            self._process_table,
            self._pending_forks,
            self._on_forked,
            on_message_burst=on_message_burst,
            on_direct_report=on_direct_report,
        )
        self.fork_servers = ForkServers(
            self._directory, self.messenger.address, self._start_fork_server, self._process_table.kill
        )
        loop.add_timer(self.fork_servers.timer)
        self._fork_coordinator = ForkCoordinator(
            self._pending_forks,
            self._launcher,
            loop,
            self._process_table,
            self.messenger.send_order,
            self._on_child_forked,
        )

    @property
    def processes(self) -> Mapping[str, ChildProcess]:
        """All running processes, by name."""
        return self._process_table.processes

    @property
    def is_empty(self) -> bool:
        """Whether no child runs or is about to start. Fork servers do not count."""
        return not self.messenger.handlers and all(map(self.fork_servers.is_fork_server, self.processes))

    def mark_changed(self) -> None:
        """Record that the content of the state file for the next daemon has changed."""
        self._has_changed = True
        self._on_change()

    def take_changed(self) -> bool:
        """Return whether `mark_changed` was called since the last call of `take_changed`."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    # --- children of the previous daemon --------------------------------------------------------------------------

    def resume(
        self, event_handler: ProcessEventHandler, generation: GenerationBase, seal_record: SealRecord | None
    ) -> bool:
        """Take over the children of a generation that the previous daemon has loaded.

        If the page store has changed since its build, kill the children instead, and return False.

        Args:
            event_handler: handles the events of the children.
            generation: the generation.
            seal_record: the size and modification time that the page store should have; None without a page store.
        """
        files = self.storage.open(generation)
        self.storage.on_exported(generation)
        survivors = {survivor.name: survivor for survivor in self._launcher.surviving_processes()}
        if self.storage.seal_record(generation) != seal_record:
            for name in generation.children.keys() & survivors.keys():
                self._kill_leftover(survivors[name])
            self.storage.remove_files(generation)
            return False
        for name, child in generation.children.items():
            try:
                process = self._launcher.watch(survivors[name])
            except (KeyError, OSError):
                exit_cause = ExitCause(None, "exited while no daemon was running")
                self._defer(functools.partial(event_handler.on_exit, name, exit_cause))
                continue
            self.messenger.handlers[name] = event_handler
            self._watch(name, process)
            is_template = generation.attach_control.is_fork_only and child.role is Role.HOLDER
            if is_template or (child.hello is not None and child.hello.origin != "spawned"):
                self.messenger.set_channel_only(name)
            else:
                self.messenger.hold_orders(name)
        count = len(generation.children)
        text = "%s: taken over from the previous daemon; processes: %d, %s"
        _log.info(text, generation.label, count, files.directory, extra=generation.log_extra())
        return True

    def remove_leftovers(self, children: Collection[str], entries: Collection[str]) -> None:
        """Kill the processes and remove the files of the previous daemon that this daemon has not taken over.

        Args:
            children: the names of the processes to keep.
            entries: the names of the entries in the private directory to keep.
        """
        self._launcher.kill_orphans()
        for survivor in self._launcher.surviving_processes():
            if survivor.name not in children:
                self._kill_leftover(survivor)
        for path in self._directory.iterdir():
            if path.name not in entries:
                shutil.rmtree(path, ignore_errors=True)

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
        """Start a child: fork it from `template` if given, else from a fork server if possible, else spawn it."""
        self.messenger.handlers[name] = event_handler
        self._interpreters[name] = program.python
        try:
            files = self.storage.create(generation, program.rank_table)
        except (PathInUse, OSError) as error:
            self._fail_start(name, str(error), transient=is_transient(error))
            return
        missing_socket = self.messenger.missing_socket()
        if missing_socket:
            self._fail_start(name, f"the daemon's socket is missing: {missing_socket}; restart weightd")
            return
        # A child that is forked from a template has loaded its model already, so it needs none of these files.
        paths = () if template else (program.model, program.weights, program.sample)
        needs_store = role is Role.WORKER and not template
        missing_file, cause = self.storage.find_missing_file(generation, paths, needs_store=needs_store)
        if missing_file is not MissingFile.NONE:
            self._fail_start(name, cause, transient=True, missing_file=missing_file)
            return
        process_spec = spec.child_spec(program, name, role, self.messenger.address, files)
        if process_spec.is_channel_only or not program.spawn_reason:
            self.messenger.set_channel_only(name)
        if template:

            def fail(failed: ProcessSpec, why: str) -> None:
                self._fail_start(failed.name, f"cannot be started by a fork: {why}")

            self._fork_coordinator.fork(ForkRequest(process_spec, template, event_loop.now() + FORK_TIMEOUT_S, fail))
        elif program.spawn_reason:
            self._start(process_spec, program.spawn_reason)
        else:
            self._fork_from_server(process_spec, program)

    def watch_weights(self, worker: str, generation: GenerationBase) -> bool:
        """Let a worker check its shared weights before each answer on a direct channel (`ProcessManager`)."""
        holder = generation.attach_control.required_holder
        fingerprint = self.storage.fingerprints.get(generation.label)
        order = WatchWeights(bool(holder), () if fingerprint is None else fingerprint.value)
        if order == WatchWeights(has_holder=False, store=()):
            return True
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError, KeyError):
            descriptors: list[int] = []
            if holder:
                descriptors.append(self._process_table.open_statm(holder))
                opened.callback(os.close, descriptors[0])
            if fingerprint is not None:
                descriptors.append(fingerprint.descriptor)
            return self.messenger.send_descriptors(worker, order, descriptors)
        return False

    def is_alive(self, name: str) -> bool:
        """Return whether a child is alive. The result is False as soon as the child begins to exit."""
        return self._process_table.is_alive(name)

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; with `abort`, by SIGABRT, on which it logs its stacks. Its exit is reported as usual."""
        self._cancel_fork(name)
        self._process_table.kill(name, abort=abort)

    def kill_all(self) -> None:
        """Kill every child and every fork server."""
        self.fork_servers.kill_all()
        for name in list(self.messenger.handlers):
            self._cancel_fork(name)
        self._process_table.kill_all()

    # --- internal -------------------------------------------------------------------------------------------------

    def _defer(self, callback: Callable[[float], None]) -> None:
        """Have the event loop call `callback` with the current time after the caller has returned."""
        self._loop.call_soon(lambda: callback(event_loop.now()))

    def _watch(self, name: str, process: ChildProcess) -> None:
        self._process_table.add(name, process, functools.partial(self._on_exit, name))

    def _fail_start(
        self, name: str, cause: str, *, transient: bool = False, missing_file: MissingFile = MissingFile.NONE
    ) -> None:
        """Report the exit of a child that could not be started. `transient`: whether a later attempt may succeed."""
        exit_cause = ExitCause(
            None, with_limit_hint(cause), has_transient_start_failure=transient, missing_file=missing_file
        )
        self._interpreters.pop(name, None)
        event_handler = self.messenger.remove(name)
        if event_handler is not None:
            self._defer(functools.partial(event_handler.on_exit, name, exit_cause))

    def _fork_from_server(self, process_spec: ProcessSpec, program: WorkerProgram) -> None:
        """Fork a child from a fork server, or spawn it while the fork server cannot run."""
        server = self.fork_servers.find(program)
        if not server.name:
            self._start(process_spec, server.reason)
            return
        has_channel = self.messenger.channels.is_open(server.name)
        deadline = self.fork_servers.fork_deadline(server.name, has_channel=has_channel)
        self._fork_coordinator.fork(ForkRequest(process_spec, server.name, deadline, self._start))

    def _cancel_fork(self, name: str) -> None:
        if self._pending_forks.cancel(name):
            self._fail_start(name, "stopped before it was forked")

    def _start(self, process_spec: ProcessSpec, why: str) -> None:
        """Spawn a child. `why`: the reason why the child is not forked."""
        if not process_spec.is_channel_only:
            self.messenger.set_channel_only(process_spec.name, is_channel_only=False)
        try:
            process = self._launcher.start(process_spec.with_origin_note(why))
        except OSError as error:
            # The cause may be the interpreter, the log, the disk or a lack of descriptors. So if the error names
            # another file than the interpreter, the text names this file, too.
            python = process_spec.command[0]
            where = "" if error.filename in (None, python) else f": {error.filename}"
            cause = f"cannot start {python}: {error.strerror or error}{where}"
            self._fail_start(process_spec.name, cause, transient=is_transient(error))
        else:
            self._watch(process_spec.name, process)

    def _start_fork_server(self, process_spec: ProcessSpec) -> None:
        name = process_spec.name
        self.messenger.set_channel_only(name)
        with contextlib.suppress(PathInUse):  # without the directory, the start below fails with a precise error
            make_directory(self._directory, mode=0o700)
        on_exit = functools.partial(self._on_fork_server_exit, name)
        self._process_table.add(name, self._launcher.start(process_spec), on_exit)

    def _on_fork_server_exit(self, name: str) -> None:
        self.messenger.channels.read_all(name)
        self.messenger.remove(name)
        self.fork_servers.on_exit(name, self._reap(name))
        self._fork_coordinator.on_parent_exit(name)

    def _on_forked(self, parent: str, forked: Forked) -> None:
        if self._process_table.find(forked.pid) is not None:
            raise RemoteProtocolError(f"forked: expected a new process, got pid {forked.pid}")
        self._fork_coordinator.on_fork_reply(parent, forked)

    def _on_child_forked(self, process_spec: ProcessSpec, parent: str, process: ChildProcess) -> None:
        self.fork_servers.on_child_forked(parent)
        self._watch(process_spec.name, process)

    def _kill_leftover(self, survivor: SurvivingProcess) -> None:
        with contextlib.suppress(OSError):
            self._process_table.kill_unwanted(survivor.name, self._launcher.watch(survivor))

    def _on_exit(self, name: str) -> None:
        # Handle the messages that the child sent before its exit, before the exit itself is handled.
        self.messenger.receive_all(name)
        exit_cause = self._reap(name)
        python = self._interpreters.pop(name, "")
        event_handler = self.messenger.remove(name)
        if python and _MISSING_MODULE.search(exit_cause.detail):
            hint = f"install weightd there, from a checkout: {python} -m pip install ./weightd"
            exit_cause = dataclasses.replace(exit_cause, detail=f"{exit_cause.detail}; {hint}")
        # Report the pending forks of this process as failed before its exit is handled. Otherwise the event handler of
        # this process would cancel the forks.
        self._fork_coordinator.on_parent_exit(name)
        if event_handler is not None:
            event_handler.on_exit(name, exit_cause, event_loop.now())

    def _reap(self, name: str) -> ExitCause:
        """Reap a process that has exited, and kill the children that it forked but did not report."""
        if self._pending_forks.is_awaited(name):
            pids = {process.pid for process in self.processes.values()}
            with contextlib.suppress(OSError):
                self._launcher.kill_orphans_of(self.processes[name].pid, pids)
        return self._process_table.reap(name)
