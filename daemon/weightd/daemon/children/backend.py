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

from weightd.daemon.children import launch
from weightd.daemon.children.files import GenerationFiles
from weightd.daemon.children.forks import Wanted
from weightd.daemon.children.forkservers import FORK_TIMEOUT_S, ForkServer, ForkServers
from weightd.daemon.children.lanes import Lanes
from weightd.daemon.children.launch import Launch, Program
from weightd.daemon.children.launchers.direct import Direct
from weightd.daemon.children.launchers.launcher import Kept, Launcher
from weightd.daemon.children.meter import Copied
from weightd.daemon.children.nursery import Nursery
from weightd.daemon.children.owner import Owner
from weightd.daemon.children.pinning import Pinning
from weightd.daemon.children.probing import Card, Probing
from weightd.daemon.children.running import Running
from weightd.daemon.children.seals import Seals
from weightd.daemon.config.daemon import DaemonConfig
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Source
from weightd.daemon.generations.records import SealRecord
from weightd.daemon.host import clock, processes
from weightd.daemon.host.directories import ClaimError, make_directory
from weightd.daemon.host.ends import End, Lost
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.processes import Process
from weightd.daemon.host.shortage import explained
from weightd.daemon.host.sockets import BATCH, Received, bind, peer_pid, receive, send, watch
from weightd.daemon.requests.regions import Memory
from weightd.protocol import limits
from weightd.protocol.codec import Decoder, clip, encode
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.messages.children import (
    FROM_CHILD,
    Back,
    Broken,
    ChildMessage,
    Fork,
    Forked,
    Hello,
    OrderMessage,
    Predict,
    Skip,
    Stop,
    Together,
)
from weightd.shared.transient import is_transient

# weightd, or what it brings along: Python says so on stderr alone. What follows from it is a word for people.
_MISSING_MODULE = re.compile(r"No module named '(weightd|zmq|msgpack|numpy)")

# Of the frames of a message.
_TENSORS = slice(limits.MAX_HEADER_FRAMES, None)

# What a child hears in the order in which it is said, and answers in that.
_BY_LANE = frozenset((Fork, Together, Predict, Skip))

_log = logging.getLogger("weightd")


class Backend:
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
        intact: called with a generation; returns whether its page store, if it has one, is still what it was when it
            was exported.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: Loop,
        devices: Mapping[str, Card],
        launcher: Launcher | None = None,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        self.files: dict[str, GenerationFiles] = {}
        self._running = Running(loop)
        self._seals = Seals()
        self.intact = self._seals.intact
        self._directory = config.private_dir
        self._sockets = config.children_socket, config.channel_socket
        self._launcher = launcher or Direct()
        self._pinning = Pinning(self._directory, self._running, Probing(self._running, devices), self._do_later)
        self._decoder = Decoder(FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._loop = loop
        self._on_change = on_change
        self._has_changed = False
        # Whose each child is, by its name, from the moment in which it is wanted.
        self._owners: dict[str, Owner] = {}
        # Who has a lane and nothing else: what was forked, and what processes are forked of.
        self._by_lane_alone: set[str] = set()
        # With what each was started, unless that was by the daemon before this one.
        self._interpreters: dict[str, str] = {}
        # What could not be done at once is told to its owner after the actions that ordered it.
        self._later: list[Callable[[float], None]] = []
        # For children of the daemon before this one, which are not connected yet: they get them when they are heard.
        self._held: dict[str, list[OrderMessage]] = {}
        # A child that finds the socket finds the lane.
        self._lanes = Lanes(config.channel_socket, loop, self._name_of, self._on_lane, self._on_broken_lane)
        self._address = config.children_address
        self._socket = bind(context, self._address)
        self._use = watch(loop, self._socket, self._on_messages)
        self._servers = ForkServers(self._directory, self._address, self._start_server, self._running.kill)
        self._nursery = Nursery(self._launcher, loop, self.send_order, self._born, self._end_surplus, self._running.kill)

    @property
    def processes(self) -> Mapping[str, Process]:
        """Every process that runs, by name."""
        return self._running.processes

    @property
    def fork_servers(self) -> Collection[ForkServer]:
        """Of which children are forked, or would be."""
        return self._servers.all.values()

    @property
    def is_empty(self) -> bool:
        """Whether nobody has anything here: what is left only serves to start more."""
        return not self._owners and all(map(self._servers.is_one, self.processes))

    def on_several(self, handler: Callable[[], object]) -> None:
        """Call `handler` before several messages are heard that a child has sent together."""
        self._lanes.several = handler

    def prepare(self, models: Iterable[ModelConfig]) -> None:
        """Have ready what these models will be forked of, and nothing else: it takes a while to load."""
        self._servers.want(models)

    def mark_changed(self) -> None:
        """Something has changed that the next daemon would have to know."""
        self._has_changed = True
        self._on_change()

    def take_changed(self) -> bool:
        """Return whether something has, since this was asked last."""
        changed, self._has_changed = self._has_changed, False
        return changed

    # --- what the daemon before this one has left -----------------------------------------------------------------

    def resume(self, event_handler: Owner, generation: Life, seal_record: SealRecord | None) -> bool:
        """Take over the children of a generation that a daemon before this one has loaded."""
        files = self.files[generation.label] = self._files_of(generation)
        self.on_exported(generation)
        there = {kept.name: kept for kept in self._launcher.kept()}
        if self.seal_record(generation) != seal_record:
            for name in generation.children.keys() & there.keys():
                self._end_stray(there[name])
            self.remove_files(generation)
            return False
        for name in generation.children:
            try:
                process = self._launcher.watch(there[name])
            except (KeyError, OSError):
                end = End(None, "it ended while no daemon was there")
                self._do_later(functools.partial(event_handler.on_exit, name, end))
            else:
                self._owners[name] = event_handler
                self._watch(name, process)
                hello = generation.children[name].hello
                is_template = generation.attach_control.is_fork_only and generation.children[name].role is Role.HOLDER
                if is_template or (hello is not None and hello.origin != "spawned"):
                    self._by_lane_alone.add(name)
                else:
                    self._held[name] = []
        count = len(generation.children)
        text = "%s: taken over from the daemon before, %d processes, %s"
        _log.info(text, generation.label, count, files.directory, extra=generation.log_extra())
        return True

    def tidy(self, children: Collection[str], entries: Collection[str]) -> None:
        """Remove what the daemon before this one has left beside these.

        Args:
            children: by name.
            entries: of the private directory.
        """
        self._launcher.end_strays()
        for kept in self._launcher.kept():
            if kept.name not in children:
                self._end_stray(kept)
        for path in self._directory.iterdir():
            if path.name not in entries:
                shutil.rmtree(path, ignore_errors=True)

    # --- snapshots and generations --------------------------------------------------------------------------------

    def take_snapshot(self, event_handler: Owner, model: str, config: ModelConfig, source: Source, expected_sha256: str = "") -> None:
        """Take the snapshot of a model's source; `expected`: the sha256 that it has to have, "" for any."""
        self._pinning.pin(event_handler, model, config, source, expected_sha256)

    def remove_snapshot(self, model: str, source: Source) -> None:
        """Remove the snapshot, or stop taking it."""
        self._pinning.unpin(model, source)

    def copied(self, model: str, source: Source) -> Copied | None:
        """Return how much of a source's snapshot was copied; None where nothing was, or it is not known."""
        return self._pinning.copied(model, source)

    def remove_files(self, generation: Life) -> None:
        """Remove the files of a generation of which nothing is left."""
        files = self.files.pop(generation.label, None)
        if files is not None:
            files.remove()
        self._seals.forget(generation.label)

    def on_exported(self, generation: Life) -> None:
        """Remember what the holder has left in the page store, if it has one."""
        files = self.files.get(generation.label)
        if files is not None:
            self._seals.add(generation.label, files.store)

    def seal_record(self, generation: Life) -> SealRecord | None:
        """Return what the page store of the generation was when it was exported, if it has one."""
        return self._seals.find(generation.label)

    # --- children -------------------------------------------------------------------------------------------------

    def spawn(
        self, event_handler: Owner, generation: Life, program: Program, name: str, role: Role, template: str = ""
    ) -> None:
        """Start a holder or a worker: forked of `template`, if that is one, else of a fork server, if that can be."""
        self._owners[name] = event_handler
        self._interpreters[name] = program.python
        try:
            files = self.files.setdefault(generation.label, self._files_of(generation))
            if not files.directory.is_dir():
                files.create(program.table)
        except (ClaimError, OSError) as error:
            self._give_up(name, str(error), transient=is_transient(error))
            return
        gone = next((path for path in self._sockets if not path.exists()), None)
        if gone is not None:
            self._give_up(name, f"the socket where it would connect is gone: {gone}; restart weightd")
            return
        # Whom a template is forked to has its model already.
        lost, cause = (Lost.NOTHING, "") if template else self._lost(generation, program, role)
        if lost is not Lost.NOTHING:
            self._give_up(name, cause, transient=True, lost=lost)
            return
        told = launch.child(program, name, role, self._address, self.files[generation.label])
        if told.by_lane or not program.why_spawned:
            self._by_lane_alone.add(name)
        server = None if program.why_spawned else self._servers.find(program)
        if template:
            self._nursery.fork(Wanted(told, template, clock.now() + FORK_TIMEOUT_S, self._give_up_fork))
        elif server is not None and server.name:
            due = self._servers.due(server.name, has_lane=self._lanes.is_open(server.name))
            self._nursery.fork(Wanted(told, server.name, due, self._start))
        else:
            why = "no fork server is wanted for it any more" if server is None else server.why
            self._start(told, program.why_spawned or why)

    def send_order(
        self, name: str, order: OrderMessage, frames: Sequence[Any] = (), regions: Sequence[Memory] = ()
    ) -> None:
        """Send an order to a child; one that cannot be reached is dying, and its pidfd will tell."""
        message = [*encode(order, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames]
        kind = order.__class__
        if kind in _BY_LANE or name in self._by_lane_alone:
            if kind is Together:
                self._lanes.hold(name)
            self._lanes.send(name, message, regions)
        elif name in self._held:
            self._held[name].append(order)
        elif kind is Stop and self._lanes.leads_to(name):
            # It stops when it has done what it was asked before.
            self._lanes.send(name, message)
        else:
            send(self._socket, name.encode(), message)
            self._use()

    def unmap(self, numbers: Iterable[int]) -> None:
        """Take memory of clients away from the workers that were given it: nothing will name it again."""
        for number in numbers:
            self._lanes.unmap(number)

    def is_alive(self, name: str) -> bool:
        """Return whether a child has not begun to exit: asked of the kernel, before its death is told."""
        return self._running.lives(name)

    def kill(self, name: str, *, abort: bool = False) -> None:
        """Kill a child; its exit is told as any other."""
        if self._nursery.cancel(name):
            self._give_up(name, "it was ended before it had been forked")
        self._running.kill(name, abort=abort)

    def kill_all(self) -> None:
        """Kill every child, and what they are forked of."""
        self._servers.want(())
        for name in [name for name in self._owners if self._nursery.cancel(name)]:
            self._give_up(name, "it was ended before it had been forked")
        self._running.kill_all()

    def close(self) -> None:
        """Close the lanes."""
        self._lanes.close()

    # --- within -------------------------------------------------------------------------------------------------

    def _do_later(self, tell: Callable[[float], None]) -> None:
        self._later.append(tell)
        self._loop.soon(self._tell_later)

    def _tell_later(self) -> None:
        later, self._later = self._later, []
        now = clock.now()
        for tell in later:
            tell(now)

    def _files_of(self, generation: Life) -> GenerationFiles:
        return GenerationFiles(self._directory / generation.label)

    def _watch(self, name: str, process: Process) -> None:
        self._running.add(name, process, functools.partial(self._on_exit, name))

    def _lost(self, generation: Life, program: Program, role: Role) -> tuple[Lost, str]:
        """Return which files are missing that a child needs, and that for people."""
        for path in filter(None, (program.model, program.weights, program.sample)):
            if not os.path.lexists(path):
                return Lost.SNAPSHOT, f"the copy of the model in the cache folder is gone: {path}"
        store = self.files[generation.label].store
        if role is Role.WORKER and self._seals.find(generation.label) is not None and not os.path.lexists(store):
            return Lost.STORE, f"the shared weights in the cache folder are gone: {store}"
        return Lost.NOTHING, ""

    def _give_up(self, name: str, cause: str, *, transient: bool = False, lost: Lost = Lost.NOTHING) -> None:
        """There will be no such child; `transient`: the cause may go away by itself."""
        owner = self._forget_child(name)
        end = End(None, explained(cause), not_started=transient, lost=lost)
        self._do_later(functools.partial(owner.on_exit, name, end))

    def _give_up_fork(self, told: Launch, why: str) -> None:
        self._give_up(told.name, f"it cannot be forked: {why}")

    def _start(self, told: Launch, why: str) -> None:
        """Start a child that was not forked, for that reason."""
        if not told.by_lane:
            self._by_lane_alone.discard(told.name)
        try:
            process = self._launcher.start(told.because(why))
        except OSError as error:
            # The interpreter, or the log, a full disk, no descriptors left: the file tells which.
            python = told.command[0]
            where = "" if error.filename in (None, python) else f": {error.filename}"
            cause = f"cannot start {python}: {error.strerror or error}{where}"
            self._give_up(told.name, cause, transient=is_transient(error))
        else:
            self._watch(told.name, process)

    def _start_server(self, told: Launch) -> None:
        name = told.name
        self._by_lane_alone.add(name)
        with contextlib.suppress(ClaimError):  # then it cannot be started, which says why
            make_directory(self._directory, mode=0o700)
        self._running.add(name, self._launcher.start(told), functools.partial(self._on_server_exit, name))

    def _on_server_exit(self, name: str) -> None:
        self._lanes.read_out(name)
        self._lanes.forget(name)
        self._by_lane_alone.discard(name)
        self._servers.exited(name, self._reap(name))
        self._nursery.lost(name)

    def _born(self, told: Launch, parent: str, process: Process) -> None:
        self._servers.forked(parent)
        self._watch(told.name, process)

    def _end_surplus(self, name: str, process: Process) -> None:
        processes.kill(process)
        name = f"{name} ({process.pid})"
        self._running.add(name, process, functools.partial(self._running.reap, name))

    def _on_messages(self) -> int:
        """Read a batch of messages; return how many there were."""
        now = clock.now()
        count = 0
        for received in receive(self._socket):
            count += 1
            # No name of ours has what stands for bytes that are no text.
            name = received.peer.decode(errors="replace")
            owner = self._owners.get(name)
            if owner is not None:
                message = self._message(name, received)
                if isinstance(message, Back):
                    # It has connected its lane before it said so.
                    self._lanes.accept()
                for order in self._held.pop(name, ()):
                    self.send_order(name, order)
                owner.on_message(name, message, received.frames[_TENSORS], now)
        return count

    def _hear_of_births(self) -> None:
        """Read what has been said of children that are being forked: it was sent before they could do anything."""
        for parent in self._nursery.parents():
            self._lanes.read_out(parent)

    def _message(self, name: str, received: Received) -> ChildMessage:
        try:
            message: ChildMessage = self._decoder.decode(received.frames)
        except RemoteProtocolError as error:
            return _broken(error)
        if isinstance(message, Forked):
            return _broken(RemoteProtocolError("forked: expected it by the lane"))
        if isinstance(message, Hello):
            # The kernel knows who says HELLO: it must be the process that was started under that name.
            pid, expected = peer_pid(received.identity), self._pid(name)
            if pid not in (None, expected):
                return _broken(RemoteProtocolError(f"hello: expected from pid {expected}, got it from {pid}"))
        if isinstance(message, Broken):
            return _explained(message)
        return message

    def _pid(self, name: str) -> int | None:
        process = self.processes.get(name)
        return None if process is None else process.pid

    def _name_of(self, pid: int) -> str | None:
        self._hear_of_births()
        return next((name for name, process in self.processes.items() if process.pid == pid), None)

    def _on_lane(self, name: str, frames: Sequence[Any]) -> None:
        try:
            message: ChildMessage = self._decoder.decode(frames)
            if isinstance(message, Forked):
                self._on_forked(name, message)
                return
            if isinstance(message, Broken):
                message = _explained(message)
        except RemoteProtocolError as error:
            self._on_broken_lane(name, error)
            return
        if name in self._owners:
            self._owners[name].on_message(name, message, frames[_TENSORS], clock.now())

    def _on_forked(self, name: str, forked: Forked) -> None:
        if any(process.pid == forked.pid for process in self.processes.values()):
            raise RemoteProtocolError(f"forked: expected a new process, got pid {forked.pid}")
        self._nursery.answered(name, forked)

    def _on_broken_lane(self, name: str, error: RemoteProtocolError) -> None:
        if name in self._owners:
            self._owners[name].on_message(name, _broken(error), (), clock.now())
        else:
            _log.warning("%s: it broke the protocol: %s", name, error)
            self._running.kill(name)

    def _on_exit(self, name: str) -> None:
        # What it said before it died counts: read it first, all of it.
        self._lanes.read_out(name)
        while self._on_messages() == BATCH:
            pass
        self._use()
        end = self._reap(name)
        python = self._interpreters.get(name, "")
        owner = self._forget_child(name)
        if python and _MISSING_MODULE.search(end.words):
            hint = f"install weightd there: {python} -m pip install weightd"
            end = dataclasses.replace(end, words=f"{end.words}; {hint}")
        # First: whom it has not forked would be ended else for nothing.
        self._nursery.lost(name)
        owner.on_exit(name, end, clock.now())

    def _reap(self, name: str) -> End:
        """Wait for a process that has exited, and for what it has forked and could not tell any more."""
        if self._nursery.awaits(name):
            pids = {process.pid for process in self.processes.values()}
            with contextlib.suppress(OSError):
                self._launcher.end_strays_of(self.processes[name].pid, pids)
        return self._running.reap(name)

    def _forget_child(self, name: str) -> Owner:
        self._lanes.forget(name)
        self._held.pop(name, None)
        self._interpreters.pop(name, None)
        self._by_lane_alone.discard(name)
        return self._owners.pop(name)

    def _end_stray(self, kept: Kept) -> None:
        with contextlib.suppress(OSError):
            self._end_surplus(kept.name, self._launcher.watch(kept))


def _explained(broken: Broken) -> Broken:
    return dataclasses.replace(broken, cause=clip(explained(broken.cause)))


def _broken(error: RemoteProtocolError) -> Broken:
    return Broken(clip(f"it broke the protocol: {error}"))
