"""The daemon's one loop: wait, handle, reconcile; and its life from the first bind to the last exit."""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from weightd.daemon import exits
from weightd.daemon.children.backend import Backend
from weightd.daemon.children.meter import Copied
from weightd.daemon.children.running import Running
from weightd.daemon.clients.access import Access
from weightd.daemon.clients.connection import proxied_identity
from weightd.daemon.clients.frontend import Frontend
from weightd.daemon.clients.gates import Bounds, Gates, Lock
from weightd.daemon.config.devices import DeviceConfig
from weightd.daemon.config.listeners import NONE, allowed_keys
from weightd.daemon.config.load import Config, ConfigError
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.continuity import handover
from weightd.daemon.continuity.claim import claim
from weightd.daemon.continuity.config_file import ConfigFile
from weightd.daemon.continuity.handover import Handover
from weightd.daemon.continuity.herald import Herald
from weightd.daemon.continuity.keeping import Keeping
from weightd.daemon.continuity.ledger import Entry, Ledger
from weightd.daemon.continuity.listening import Listening, listen
from weightd.daemon.continuity.reading import ConfigReader, Read
from weightd.daemon.continuity.service import CLIENTS, KEEPER, Manager
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.gate.zygote import Zygote
from weightd.daemon.generations.plan import Source
from weightd.daemon.host import audit, clock, spawning
from weightd.daemon.host.clientlog import ClientLog
from weightd.daemon.host.closing import INTERRUPT
from weightd.daemon.host.crowding import allow_descriptors
from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.happened import Happened
from weightd.daemon.host.listening import listens_on_loopback
from weightd.daemon.host.loop import Loop, signals
from weightd.daemon.host.memory import MIB, host_bytes
from weightd.daemon.host.shortage import check_threads, explained
from weightd.daemon.host.timers import Timer
from weightd.daemon.meters.meters import MeterFigures, Meters
from weightd.daemon.meters.totals import TotalFigures, Totals
from weightd.daemon.models.attaching import Attaching
from weightd.daemon.models.budget import Device
from weightd.daemon.models.fleet import Change, Fleet
from weightd.daemon.models.household import Households
from weightd.daemon.models.model import Model
from weightd.daemon.models.pace import PaceFigures
from weightd.daemon.models.records import DeviceRecord
from weightd.daemon.models.sources import Numbers
from weightd.daemon.observe.accounting import Accounting
from weightd.daemon.observe.loading import Loading
from weightd.daemon.observe.memory import Copy, Found, Memory, copies
from weightd.daemon.observe.metrics import Counted, Moment, tell
from weightd.daemon.observe.own import own_report
from weightd.daemon.observe.reports import Reports
from weightd.daemon.observe.status import Subject, report
from weightd.daemon.observe.survey import Measured, Survey
from weightd.daemon.observe.tails import Tails
from weightd.daemon.requests.blame.suspects import Known
from weightd.daemon.requests.shares import Clocks
from weightd.daemon.requests.signature import Waiter
from weightd.daemon.scrapes.page import Page
from weightd.daemon.scrapes.scrapes import Scrapes
from weightd.daemon.shutdown import Event, Shutdown
from weightd.daemon.tenants.accounts import Accounts, Figures
from weightd.daemon.tenants.directory import Directory, members
from weightd.daemon.tenants.tenant import EVERYONE, Viewer
from weightd.protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd.protocol.messages.control import ReloadResponse
from weightd.protocol.messages.journal import Events, Logs
from weightd.protocol.messages.metrics import MetricsResponse
from weightd.protocol.schema import label
from weightd.protocol.version import VERSION
from weightd.shared.devices import is_cpu
from weightd.shared.terminal import Terminal, ends_on_hangup

_log = logging.getLogger("weightd")

# What it takes to leave after the last request has ended.
_STOP_MARGIN_S = 10.0

# Of the host's memory, by default, for what clients send and do not read; the models have the rest.
_SHARE_OF_MEMORY = 4

# Of libzmq, in a process with one context.
_ZEROMQ_THREADS = 2
# A reload reads the file once for all that wait for it.
_MAX_RELOADS = 16

# For a file, and for those that it names: a file system may not answer.
_READ_TIMEOUT_S = 60.0
_NEVER = float("inf")

# Few may ask for logs, and each question may read a megabyte.
_MAX_TAILS = 4


class Server:
    """Runs the models of one configuration.

    Args:
        config: what to serve, and where.
        file: that it comes from, to be read again on SIGHUP.
        manager: who is told how it goes, and passes sockets and the keeper on from one daemon to the next.
        one_shot: end when a model fails instead of serving the others (`weightd run`); it is what asks the model, to be
            told once that serves. "": go on.
        zygote: makes its gates; None to start one then.
    """

    def __init__(
        self,
        config: Config,
        file: ConfigFile | None = None,
        manager: Manager | None = None,
        *,
        one_shot: str = "",
        zygote: Zygote | None = None,
    ) -> None:
        self._config = config
        self._file = file
        self._manager = manager or Manager({})
        self._herald = Herald(self._manager.watchdog)
        # Without a manager that holds on to it a keeper would be of no use.
        self._keeping: Keeping | None = None
        self._devices: dict[str, Device] = {}
        self._attaching = Attaching()
        self._suspects = Known()
        self._clocks = Clocks()
        self._one_shot = one_shot
        self._has_told = False
        self._zygote = zygote
        self._loop = Loop()
        self._households = Households()
        self._fleet = Fleet(self._make)
        self._tenants = Directory(config.tenants)
        self._accounts = Accounts()
        self._meters = Meters()
        self._totals = Totals(lambda: self._frontend.dropped_responses)
        self._access = Access(self._tenants, self._accounts, _admitted(config))
        self._accounting = Accounting(self._tenants, self._accounts, lambda: self._fleet.models)
        self._loading = Loading(self._copied)
        books = {
            "account": Entry(self._accounts, Figures),
            "model": Entry(self._meters, MeterFigures),
            "daemon": Entry(self._totals, TotalFigures),
            "load": Entry(self._loading, PaceFigures),
        }
        self._ledger = Ledger(config.daemon.counters_file, books, self._loop.soon)
        self._reports = Reports(
            self._loop, lambda asker, error: self._frontend.tell_error(asker.client, asker.request_id, error)
        )
        self._measured = Measured()
        self._memory = Memory()
        self._tails: list[Tails] = []
        self._happened, self._client_log = Happened(), ClientLog()
        self._has_changed = True
        self._started = time.monotonic()
        self._shutdown = Shutdown()
        self._terminal = Terminal()
        self._scrapes: Scrapes | None = None
        self._patience = Timer(self._end)
        self._reader = ConfigReader(Running(self._loop))
        self._patience_with_reader = Timer(lambda _: self._reader.give_up())
        # Whom to tell of the reload under way, and of the next one.
        self._reading: list[Callable[[Change | RequestError], object]] = []
        self._reloads: list[Callable[[Change | RequestError], object]] = []
        self._sign = Timer(self._tell_manager)

    def run(self) -> int:
        """Serve until told to stop; return the exit status.

        Raises:
            ClaimError: a socket or a directory cannot be had.
        """
        allow_descriptors()
        check_threads(_ZEROMQ_THREADS)
        try:
            spawning.begin()
        except OSError as error:
            raise ClaimError(explained(f"cannot start the thread that starts processes: {error}")) from None
        kept = self._manager.there
        numbers = [signal.SIGTERM, signal.SIGINT, INTERRUPT]
        # With a file SIGHUP is a reload, even under nohup; without one it ends the daemon, unless it is ignored.
        if self._file is not None or ends_on_hangup():
            numbers.append(signal.SIGHUP)
        with (
            claim(self._config.daemon, kept=kept),
            listen(self._config, self._manager.inherited.get(CLIENTS, [])) as sockets,
            signals(numbers) as wakeups,
            self._happened.listening(),
        ):
            if kept:
                self._keeping = Keeping(self._manager, self._config.daemon)
            else:
                # Of a service that had one: with nobody to hold on to it, it ends.
                for descriptor in self._manager.inherited.get(KEEPER, []):
                    os.close(descriptor)
            context = zmq.Context()
            try:
                self._open(context, wakeups, sockets)
                self._main_loop()
            finally:
                self._close()
                context.destroy()
                self._loop.close()
                if self._keeping is not None:
                    self._keeping.close()
        models = self._fleet.models.values()
        if any(deployment.is_failing for model in models for deployment in model.deployments):
            return exits.MODEL_FAILED
        if self._fleet.deaths:
            _log.warning("%d processes ended that nobody had asked to: the exit status tells", self._fleet.deaths)
            return exits.PROCESS_DIED
        return exits.OK

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], wakeups: int, sockets: Listening) -> None:
        daemon = self._config.daemon
        _update_devices(self._devices, self._config)
        self._backend = Backend(context, daemon, self._loop, self._devices, self._keeping, self._on_change)
        most = daemon.max_memory_bytes or host_bytes() // _SHARE_OF_MEMORY
        shared = daemon.max_shm_bytes or host_bytes() // _SHARE_OF_MEMORY
        self._frontend = Frontend(
            self._loop,
            self._fleet,
            most,
            self,
            max_shm_bytes=shared,
            user_limits=daemon.user_limits,
            authorizer=self._access,
            log=self._client_log,
        )
        self._backend.on_several(self._frontend.cork)
        for listener in sockets.unix:
            self._frontend.listen(listener)
        listeners = {name: (each, self._lock(name)) for name, each in sockets.listeners.items()}
        bounds = Bounds(most, daemon.user_limits)
        self._gates = Gates(listeners, self._loop, self._adopt, bounds, self._client_log, self._zygote)
        self._scrapes = self._tell_scrapes(sockets.metrics)
        self._loop.on_pause(self._paused)
        self._loop.add(wakeups, lambda: self._on_signals(os.read(wakeups, 64)))
        self._loop.add_timer(self._patience)
        self._loop.add_timer(self._sign)
        self._loop.add_timer(self._reports.timer)
        for timer in (*self._accounting.timers, self._ledger.timer, self._patience_with_reader):
            self._loop.add_timer(timer)
        if self._manager.there:
            self._sign.set(0.0)
        _log.info("weightd %s, pid %d, listens on %s", VERSION, os.getpid(), ", ".join(sockets.addresses))
        for name, each in self._config.listeners.items():
            if each.insecure:
                _log.warning("listener %s, %s, is insecure: whoever reaches it may ask", name, each.address)
        if self._keeping is not None and self._file is not None:
            self._file.in_force()
        if self._keeping is not None and self._keeping.inheritance is not None:
            self._resume(self._keeping, self._keeping.inheritance)
        else:
            # They load while snapshots are taken.
            self._backend.prepare(self._config.models.values())
            self._fleet.start(self._config.models, clock.now())
        if self._file is not None:
            self._ledger.open(clock.now())
        self._account(clock.now())

    def _tell_scrapes(self, listener: socket.socket | None) -> Scrapes | None:
        """Answer who connects there with all that is counted: who reads it is the operator's choice."""
        if listener is None:
            return None
        page = Page(lambda: self.metrics("scrape", Viewer(EVERYONE, sees_all=True)), self._loop.soon)
        is_loopback = listens_on_loopback(listener)
        _log.info("metrics are told at %s", self._config.daemon.metrics)
        if not is_loopback and listener.family != socket.AF_UNIX:
            _log.warning("metrics at %s: whoever reaches it sees them", self._config.daemon.metrics)
        return Scrapes(listener, self._loop, page, is_loopback=is_loopback)

    def _lock(self, listener: str) -> Lock:
        config, tenants = self._config.listeners[listener], self._config.tenants
        return Lock(
            config.secret,
            allowed_keys(config, tenants),
            config.max_connections,
            members(tenants, config.tenants) if tenants else None,
        )

    def _adopt(self, listener: str, connection: socket.socket, peer: PeerIdentity) -> None:
        self._frontend.adopt(connection, proxied_identity(connection, listener, peer))

    def _resume(self, keeping: Keeping, handover: Handover) -> None:
        """Go on with what the daemon before this one has loaded."""
        before = {record.name: record.config for record in handover.models}
        for name in dict.fromkeys(device for config in before.values() for device in config.devices_by_weight_copy):
            self._devices.setdefault(name, Device(name))
        for said in handover.devices:
            device = self._devices.setdefault(said.name, Device(said.name))
            device.reported_bytes, device.free_bytes = said.capacity, said.free
            device.capacity_bytes = device.capacity_bytes or device.reported_bytes
        children = [name for record in handover.models for name in record.children]
        entries = [name for record in handover.models for name in record.directories]
        self._backend.tidy(children, [*entries, *keeping.entries])
        self._backend.prepare(self._config.models.values())
        self._fleet.resume(handover.models, self._config.models, clock.now())
        self._herald.resumed(before)

    def _make(self, name: str, config: ModelConfig, numbers: Numbers) -> Model:
        model = self._households.make(name, config, self._devices, self._backend, self._frontend, numbers)
        model.load_limiter = self._attaching
        model.dispatcher.count_with(self._meters.of(name))
        model.dispatcher.scheduler.clocks = self._clocks
        model.dispatcher.guard.suspects.tenants = self._suspects
        model.dispatcher.guard.log = self._client_log
        self._loop.add_timer(model.timer)
        return model

    def _account(self, now: float) -> None:
        """The tables of tenants are in force."""
        self._meters.keep(self._fleet.models)
        self._clocks.max_job_s = self._config.daemon.max_job_s
        self._accounting.renew(self._config.daemon.accounting_interval, now)

    def _close(self) -> None:
        """Let clients go, those of the gates first: they still have to be passed on what was said to them."""
        self._ledger.close()
        if self._scrapes is not None:
            self._scrapes.close()
        self._frontend.close()
        self._gates.close()

    # --- the loop -----------------------------------------------------------------------------------------------

    def _main_loop(self) -> None:
        try:
            self._look()
            self._loop.run()
        finally:
            self._loop.each_turn(None)
            self._reader.give_up()
            if self._keeping is None:
                self._backend.kill_all()
            self._backend.close()

    def _paused(self, seconds: float) -> None:
        """The daemon did not run for so long: its processes get that much longer, and others have waited for it."""
        _log.warning("the daemon did not run for %.1f s; extending the time limits of its processes", seconds)
        now = clock.now()
        for model in self._fleet.all_models():
            model.dispatcher.scheduler.paused(seconds, now)
        if self._manager.there:
            self._herald.paused(seconds)
            self._sign.set(now)

    def _finished(self) -> bool:
        if not self._shutdown.ending or any(model.dispatcher.has_to_refuse for model in self._fleet.all_models()):
            return False
        return self._keeping is not None or self._backend.is_empty

    def _on_change(self) -> None:
        """A generation, or a child, is not what it was."""
        self._has_changed = True
        self._look_soon()

    def _look_soon(self) -> None:
        """Something has changed, and that is more than a request."""
        self._loop.soon(self._look)

    def _look(self) -> None:
        """What is left to do after that; and after anything at all while a model or the daemon is about to leave."""
        now = clock.now()
        if self._fleet.changing:
            self._fleet.reconcile(now)
        if self._has_changed:
            self._look_at_loads(now)
        if self._manager.there and self._backend.take_changed():
            self._record()
            self._announce(now)
        # The next daemon knows of it now, too.
        self._frontend.send_saved_responses()
        if self._one_shot:
            self._look_once(now)
        if self._shutdown.finishing and self._idle():
            self._end(now)
        if self._finished():
            self._loop.stop()
        self._loop.each_turn(self._look if self._fleet.changing or self._shutdown.begun else None)

    def _copied(self, model: str, source: Source) -> Copied | None:
        return self._backend.copied(model, source)

    def _look_at_loads(self, now: float) -> None:
        self._has_changed = False
        self._loading.look(self._fleet.all_models(), now)

    def _look_once(self, now: float) -> None:
        """There is one model, for a first look at it."""
        if self._any_failed():
            self._stop(now)
        if (
            not self._shutdown.begun
            and not self._has_told
            and all(each.is_complete for each in self._fleet.models.values())
        ):
            self._has_told = True
            _log.info("it serves; to ask it: %s", self._one_shot)

    def _tell_manager(self, now: float) -> None:
        """It is time for a sign of life; the next daemon comes first."""
        if self._backend.take_changed():
            self._record()
        self._announce(now)

    def _record(self) -> None:
        if self._keeping is not None and not self._shutdown.ending:
            devices = [DeviceRecord(each.name, each.reported_bytes, each.free_bytes) for each in self._devices.values()]
            handover.write(self._keeping.handover, self._fleet.records(), devices)

    def _announce(self, now: float) -> None:
        if self._shutdown.begun:
            return
        self._look_at_loads(now)
        models = self._fleet.models.values()
        self._manager.notify(
            *self._herald.look(models, now, self._note, lambda each: self._loading.told(each.label, now))
        )
        self._sign.set(self._herald.next_event)
        if self._herald.failed(self._fleet.models.values()):
            _log.error("a required model has failed")
            self._stop(now)

    def unmap(self, numbers: Sequence[int]) -> None:
        """No client names these regions any more."""
        self._backend.unmap(numbers)

    @property
    def stopping(self) -> bool:
        """Whether no new request is taken."""
        return self._shutdown.begun

    @property
    def _note(self) -> str:
        return "" if self._file is None else self._file.note

    def _any_failed(self) -> bool:
        return any(model.has_failed for model in self._fleet.models.values())

    def _idle(self) -> bool:
        return all(model.dispatcher.idle for model in self._fleet.all_models())

    # --- the end ------------------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        now = clock.now()
        for number in numbers:
            if number == INTERRUPT:
                # It was for a thread, whose system call has ended by now.
                continue
            _log.info("%s", signal.Signals(number).name)
            if number == signal.SIGHUP:
                self._on_hangup(now)
            elif not self._shutdown.begun:
                self._stop(now)
            else:
                _log.warning("asked twice to stop: no request is waited for")
                self._shutdown.on(Event.INSIST)
                # First: a model that does not stop would replace what is killed.
                self._stop_models(now)
                if self._keeping is None:
                    self._backend.kill_all()

    def _stop(self, now: float) -> None:
        """Take nothing new; finish what was accepted."""
        if not self._shutdown.begun:
            patience = self._config.daemon.drain_timeout
            _log.info("stopping: finishing what was accepted, for at most %g s", patience)
            self._shutdown.on(Event.STOP)
            self._look_soon()
            self._patience.set(now + patience)
            self._manager.notify("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(1e6 * (patience + _STOP_MARGIN_S))}")

    def _end(self, now: float) -> None:
        """What was accepted is finished, or the time for that is over."""
        if self._shutdown.finishing:
            self._shutdown.on(Event.DONE)
            self._stop_models(now)

    def _stop_models(self, now: float) -> None:
        if self._keeping is not None:
            # The keeper ends the processes, or the next daemon goes on with them: who knows.
            self._fleet.hand_over(now)
        else:
            self._fleet.drain(now)

    # --- another configuration ----------------------------------------------------------------------------------

    def _on_hangup(self, now: float) -> None:
        if self._file is None or self._terminal.has_closed():
            # The kernel and the shell may both send it: that is no request to hurry.
            self._stop(now)
            return
        # READY=1 ends a reload, and a start: before that is over nothing is said of a reload.
        tell = self._herald.ready and not self._shutdown.begun
        if tell:
            self._manager.reloading()
        try:
            self._reload(functools.partial(self._hung_up, tell=tell))
        except RequestError as error:
            self._hung_up(error, tell=tell)

    def _hung_up(self, outcome: Change | RequestError, *, tell: bool) -> None:
        entry = audit.Entry("reload", audit.OPERATOR)
        if isinstance(outcome, RequestError):
            _log.error("not reloaded, nothing has changed: %s", outcome)
            audit.write(entry, audit.FAILED, str(outcome))
        else:
            audit.write(entry, audit.OK)
        if tell:
            self._manager.notify("READY=1")

    def ask_reload(self, client: bytes, request_id: str) -> None:
        """A client wants the configuration to be read again: it is told how that has ended.

        Raises:
            RequestError: nothing has changed.
        """
        self._reload(functools.partial(self._answer_reload, client, request_id))

    def _answer_reload(self, client: bytes, request_id: str, outcome: Change | RequestError) -> None:
        if isinstance(outcome, RequestError):
            self._frontend.reply_failed(client, request_id, outcome)
        else:
            self._frontend.reply_reloaded(client, ReloadResponse(request_id, *outcome))

    def _reload(self, on_end: Callable[[Change | RequestError], object]) -> None:
        """Have the configuration file read again; call `on_end` once it is in force, or refused.

        Raises:
            RequestError: nothing has changed.
        """
        if self._file is None:
            raise InvalidArgument("weightd was started without a configuration file: there is nothing to reload")
        if self._shutdown.begun:
            raise Unavailable("weightd is stopping")
        if len(self._reloads) == _MAX_RELOADS:
            raise ResourceExhausted(f"{_MAX_RELOADS} reloads wait already")
        self._reloads.append(on_end)
        if len(self._reloads) == 1:
            self._loop.soon(self._read_config)

    def _read_config(self) -> None:
        """Have the file read for all that wait; a reload that comes later reads it once more."""
        if self._file is None or self._reading or not self._reloads:
            return
        self._reading, self._reloads = self._reloads, []
        try:
            self._reader.start(self._file.path, self._file.listening, self._config_was_read)
        except OSError as error:
            text = f"{self._file.path}: cannot start the process that reads it: {error.strerror}"
            self._config_was_read(Read(problems=(text,)))
        else:
            self._patience_with_reader.set(clock.now() + _READ_TIMEOUT_S)

    def _config_was_read(self, found: Read) -> None:
        self._patience_with_reader.set(_NEVER)
        waiting, self._reading = self._reading, []
        outcome: Change | RequestError
        try:
            outcome = self._renew(found, clock.now())
            self._totals.reloads += 1
        except RequestError as error:
            outcome = error
            self._totals.refused_reloads += 1
        for each in waiting:
            each(outcome)
        self._read_config()

    def _renew(self, found: Read, now: float) -> Change:
        """Make true what was read of the configuration file.

        Raises:
            InvalidArgument: the file is wrong; nothing has changed.
            Unavailable: not now; nothing has changed.
        """
        file = self._file
        if file is None or self._shutdown.begun:
            raise Unavailable("weightd is stopping")
        try:
            config = file.take(found)
            self._check_fixed(file.path, config)
            change = self._fleet.compare(config.models)
            # What serves as before needs its files no more.
            wrong = [each for name in (*change.added, *change.changed) for each in found.of_models.get(name, ())]
            if wrong:
                raise ConfigError(*wrong)
        except ConfigError as error:
            file.note = f"not reloaded: {error}"
            raise InvalidArgument(str(error)) from None
        _update_devices(self._devices, config)
        self._backend.prepare(config.models.values())
        self._fleet.apply(change, config.models, now)
        before, self._config = self._config, config
        if (config.tenants, _admitted(config)) != (before.tenants, _admitted(before)):
            self._tenants.renew(config.tenants)
            self._access.listener_tenants = _admitted(config)
            self._gates.update_auth({name: self._lock(name) for name in config.listeners})
            self._frontend.on_tenants_changed()
        self._look_soon()
        self._account(now)
        file.note = ""
        if self._keeping is not None:
            file.in_force()
        _log.info("reloaded %s: %s", file.path, change)
        return change

    def _check_fixed(self, path: Path, config: Config) -> None:
        before, now = _fixed(self._config), _fixed(config)
        differ = [
            f"{path}: {key}: expected {before.get(key)!r} as before, got {now.get(key)!r}: restart"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ]
        if differ:
            raise ConfigError(*differ)

    # --- status -------------------------------------------------------------------------------------------------

    def ask_status(self, asker: Waiter, viewer: Viewer) -> None:
        """A client wants to know how it stands: it is told once that has been measured."""
        if viewer.sees_all:
            pids = [*self._own_pids(), *(process.pid for process in self._backend.processes.values())]
            survey = Survey(asker.request_id, pids, self._measured)
            self._reports.ask(asker, functools.partial(self._measure, asker.client, survey))
        else:
            self._reports.ask(asker, functools.partial(self._answer_own_status, asker, viewer))

    def ask_metrics(self, asker: Waiter, viewer: Viewer) -> None:
        """A client wants to know what was counted."""

        def answer() -> bool:
            self._frontend.reply_metrics(asker.client, self.metrics(asker.request_id, viewer))
            return True

        self._reports.ask(asker, answer)

    def ask_events(self, asker: Waiter, question: Events) -> None:
        """A client wants to know what has happened."""

        def answer() -> bool:
            self._frontend.reply_events(asker.client, self._happened.answer(question))
            return True

        self._reports.ask(asker, answer)

    def metrics(self, request_id: str, viewer: Viewer) -> MetricsResponse:
        """Return what was counted, and how things stand."""
        models = list(self._fleet.models.values())
        found = self._memory.look(self._own_pids(), lambda: self._copies(models)) if viewer.sees_all else Found()
        counted = Counted(
            models,
            self._meters,
            self._totals,
            self._tenants.known if self._tenants.tells_apart else self._tenants,
            self._accounts,
            self._frontend.memory_budget.used_bytes,
            self._frontend.memory_budget.max_bytes,
            found.footings,
            found.pss,
        )
        state, uptime = self._standing()
        return tell(request_id, Moment(state, uptime, clock.now()), viewer, counted)

    def _copies(self, models: Sequence[Model]) -> Mapping[str, Sequence[Copy]]:
        return copies(models, self._backend.processes, self._backend.files)

    def _measure(self, client: bytes, survey: Survey) -> bool:
        """Look at one process more; return whether the answer has been sent."""
        is_done = survey.step()
        if is_done:
            self._answer_status(client, survey)
        return is_done

    def _answer_own_status(self, asker: Waiter, viewer: Viewer) -> bool:
        models = list(self._fleet.models.values())
        told = own_report(asker.request_id, *self._standing(), viewer.tenant, models, self._accounts)
        self._frontend.reply_status(asker.client, told)
        return True

    def ask_logs(self, client: bytes, question: Logs) -> None:
        """A client wants to know what the processes of a model have said: it is told once that has been read."""
        if len(self._tails) == _MAX_TAILS:
            raise ResourceExhausted(f"{_MAX_TAILS} questions for logs are being answered")
        generations = self._fleet.models[question.model_name].generations
        files = self._backend.files
        there = {each.number: files[each.label] for each in generations if each.label in files}
        self._tails.append(Tails(client, question, there))
        self._loop.soon(self._read_log)

    def _read_log(self) -> None:
        """Read one file more."""
        if self._tails[0].step():
            tails = self._tails.pop(0)
            self._frontend.reply_logs(tails.client, tails.answer)
        if self._tails:
            self._loop.soon(self._read_log)

    def _own_pids(self) -> list[int]:
        keeper = [] if self._keeping is None else [self._keeping.pid]
        return [os.getpid(), *keeper, *self._gates.pids]

    def _standing(self) -> tuple[str, float]:
        return "stopping" if self._shutdown.begun else "running", time.monotonic() - self._started

    def _answer_status(self, client: bytes, survey: Survey) -> None:
        backend, now = self._backend, clock.now()
        self._look_at_loads(now)
        subject = Subject(
            self._fleet.models.values(),
            self._devices.values(),
            backend.processes,
            backend.files,
            self._frontend.dropped_responses,
            self._frontend.memory_budget.used_bytes,
            self._frontend.memory_budget.max_bytes,
            self._own_pids(),
            self._note,
            self._gates.proxies,
            backend.fork_servers,
            self._tenants.known if self._tenants.tells_apart else (),
            self._accounts,
            functools.partial(self._loading.share, now=now),
        )
        self._frontend.reply_status(client, report(survey, *self._standing(), subject))


def _fixed(config: Config) -> dict[str, object]:
    """Return what only a start puts in force, by key."""
    fixed: dict[str, object] = {f"daemon.{key}": value for key, value in vars(config.daemon).items()}
    for key in ("drain_timeout", "accounting_interval", "max_job_s"):
        del fixed[f"daemon.{key}"]
    for name, each in config.listeners.items():
        keys = {"address": each.address, "key": each.key, "max_connections": each.max_connections}
        keys["security"] = "" if each.security == NONE else each.security
        fixed.update((f"listeners.{label(name)}.{key}", value) for key, value in keys.items() if value)
    return fixed


def _admitted(config: Config) -> dict[str, Sequence[str]]:
    """Return the tenants that each listener is for; none: all."""
    return {name: each.tenants for name, each in config.listeners.items()}


def _update_devices(devices: dict[str, Device], config: Config) -> None:
    """Add every device that a model of the configuration uses, and set what it has as far as that is given."""
    for name in dict.fromkeys(device for model in config.models.values() for device in model.devices_by_weight_copy):
        device = devices.setdefault(name, Device(name))
        if not is_cpu(name):
            given = config.devices.get(name, DeviceConfig())
            # Where nothing is given, what the card has said before stays true.
            device.capacity_bytes = given.memory_mib * MIB or device.reported_bytes
            device.max_processes = given.processes
