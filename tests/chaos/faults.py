"""Implementations of the faults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testkit.mindir import REPOSITORY
from weightd import Client, RequestError
from weightd_protocol.messages.status import ProcessStatus, StatusResponse

from . import hostile, hostile_regions, hostile_unix
from .client import ClientPlan
from .fleet import ClientProcess, ClientProcesses
from .kinds import LETHAL, ON_DEMAND, PROXIES, Fault
from .material import Model
from .schedule import Event
from .service import Service, Watched, generations, processes, ready_workers
from .verdict import Strike

FLOOD_FACTOR = 10
POISONS = 30
IN_FLIGHT = 4
DEAF_S = 5.0
UPDATE_LIMIT_S = 30.0
RELOAD_LIMIT_S = 10.0
# The kernel kills the children with the daemon; on a busy machine their exit takes a moment.
ORPHAN_LIMIT_S = 5.0
# Less than the proxy's timeout of a handshake.
STOP_S = 2.0
# The longest delay of a restart of the proxy; the restart is immediate if the last proxy ran long enough.
PROXY_LIMIT_S = 8.0
_PROXY_CHECK_INTERVAL_S = 0.1

_DEAF_REQUESTS = 16
DEAF_CROWD = 8

_SIGNALS = {
    Fault.KILL_WORKER: signal.SIGKILL,
    Fault.SEGV_WORKER: signal.SIGSEGV,
    Fault.HANG_WORKER: signal.SIGSTOP,
}
_AT_FORK_SERVERS = {Fault.KILL_FORK_SERVER: signal.SIGKILL, Fault.STOP_FORK_SERVER: signal.SIGSTOP}
_GARBAGE: Mapping[Fault, Mapping[str, Callable[[str, random.Random], object]]] = {
    Fault.GARBAGE_FRAMES: {"ipc": hostile.send_frames, "unix": hostile_unix.send_frames},
    Fault.GARBAGE_BYTES: {"ipc": hostile.send_bytes, "unix": hostile_unix.send_bytes},
    Fault.UNFINISHED: {"ipc": hostile.send_unfinished, "unix": hostile_unix.send_unfinished},
    Fault.TRICKLE: {"unix": hostile_unix.trickle},
    Fault.DESCRIPTORS: {"unix": hostile_unix.send_descriptors},
    Fault.SCRIBBLE: {"unix": hostile_regions.scribble},
}

# Whether the daemon's status shows that the effect of a fault is over.
_Over = Callable[[StatusResponse], bool]


@dataclass
class _Open:
    """A strike whose effect lasts, and the check whether the effect is over."""

    strike: Strike
    over: _Over


@dataclass
class Injector:
    """Executor of the schedule of faults.

    Attributes:
        strikes: the faults that have struck.
        skipped: events that found no target.
        problems: failed checks, as texts.
    """

    service: Service
    fleet: ClientProcesses
    models: Mapping[str, Model]
    max_queue: int
    start_client: Callable[[int], ClientProcess]
    """Starts the client with this number (again)."""
    members: list[ClientProcess]
    """The clients of the start_client, by number."""
    strikes: list[Strike] = field(default_factory=list[Strike])
    skipped: list[Event] = field(default_factory=list[Event])
    problems: list[str] = field(default_factory=list[str])
    _open: list[_Open] = field(default_factory=list[_Open])
    _later: list[tuple[float, Callable[[], object]]] = field(default_factory=list[tuple[float, Callable[[], object]]])
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _deaf: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def strike(self, event: Event) -> None:
        """Execute an event, or record that it has no target now."""
        rng = random.Random(event.draw)
        act: Mapping[Fault, Callable[[Event, random.Random], bool]] = {
            **dict.fromkeys(_SIGNALS, self._signal_worker),
            Fault.KILL_HOLDER: self._kill_holder,
            Fault.KILL_BROKER: self._kill_broker,
            **dict.fromkeys(_AT_FORK_SERVERS, self._signal_fork_server),
            Fault.KILL_PROXY: self._kill_proxy,
            Fault.STOP_PROXY: self._stop_proxy,
            Fault.KILL_ZYGOTE: self._kill_proxy,
            Fault.TRUNCATE_STORE: self._damage_store,
            Fault.OVERWRITE_STORE: self._damage_store,
            Fault.REPLACE_STORE: self._replace_store,
            Fault.FLOOD: self._flood,
            Fault.KILL_CLIENT: self._kill_client,
            Fault.DEAF_CLIENT: self._deaf_clients,
            Fault.DEAF_CROWD: self._deaf_clients,
            Fault.POISON: self._poison,
            **dict.fromkeys(_GARBAGE, self._garbage),
            Fault.UPDATE: self._update,
            Fault.RELOAD: self._reload,
            Fault.UNLOAD: self._unload,
            Fault.KILL_DAEMON: self._kill_daemon,
        }
        if not act[event.fault](event, rng):
            self.skipped.append(event)

    def tick(self, status: StatusResponse | None) -> None:
        """Update the lasting strikes; `status` is the current status of the daemon, or None if it does not reply."""
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [each for each in self._later if each[0] > now]
        for act in due:
            act()
        if status is not None and status.pid == self.service.pid:
            for each in [each for each in self._open if each.over(status)]:
                self._over(each)

    @property
    def busy(self) -> bool:
        """Whether a background action is still running."""
        return bool(self._later) or any(each.is_alive() for each in self._threads)

    @property
    def recovering(self) -> list[Strike]:
        """The lethal strikes and restarts from which the service has not recovered."""
        watched = LETHAL | PROXIES | {Fault.KILL_DAEMON, Fault.POISON}
        return [each for each in self.lasting if each.fault in watched]

    @property
    def lasting(self) -> list[Strike]:
        """The strikes whose effect is not over, detected by the daemon or not."""
        return [each.strike for each in self._open]

    def close(self) -> None:
        """Stop all processes and threads of the injector."""
        for each in self._deaf:
            each.kill()
            each.wait()
        for thread in self._threads:
            thread.join()

    # --- processes of the daemon --------------------------------------------------------------------------------

    def _signal_worker(self, event: Event, rng: random.Random) -> bool:
        status = self._status()
        workers = ready_workers(status, event.model) if status is not None else []
        if workers:
            target = rng.choice(workers)
            self._begin(event, self._replaced(event.model, [target]), f"{target.name}, pid {target.pid}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, _SIGNALS[event.fault])
        return bool(workers)

    def _kill_holder(self, event: Event, rng: random.Random) -> bool:
        status = self._status()
        there = processes(status, event.model) if status is not None else []
        holders = [each for each in there if each.role == "holder" and each.state == "holding"]
        if holders:
            holder = rng.choice(holders)
            self._begin(event, _gone([holder]), f"{holder.name}, pid {holder.pid}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder.pid, signal.SIGKILL)
        return bool(holders)

    def _kill_broker(self, event: Event, rng: random.Random) -> bool:
        """Signal the broker. Its ranks exit with it, so the effect is over when all are replaced."""
        status = self._status()
        there = processes(status, event.model) if status is not None else []
        brokers = [each for each in there if each.role == "broker"]
        if brokers:
            broker = rng.choice(brokers)
            self._begin(event, self._replaced(event.model, [broker]), f"{broker.name}, pid {broker.pid}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(broker.pid, signal.SIGKILL)
        return bool(brokers)

    def _signal_fork_server(self, event: Event, rng: random.Random) -> bool:
        """Signal the fork server. Forked workers continue; the daemon notices only at the next fork."""
        status = self._status()
        pids = [each.pid for each in status.fork_servers if each.pid] if status is not None else []
        if pids:
            pid = rng.choice(pids)
            self._begin(event, lambda status: pid not in {each.pid for each in status.fork_servers}, f"pid {pid}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _AT_FORK_SERVERS[event.fault])
        return bool(pids)

    def _kill_proxy(self, event: Event, _: random.Random) -> bool:
        before = self.service.front()
        victim = before.get("zygote" if event.fault is Fault.KILL_ZYGOTE else "proxy")
        if victim is None or "proxy" not in before:
            return False

        def watch() -> None:
            # This runs in a separate thread, because on a busy machine the other faults delay the next tick by seconds.
            limit = time.monotonic() + PROXY_LIMIT_S
            while self.service.pid == before["daemon"]:
                if self.service.front().get("proxy", before["proxy"]) != before["proxy"]:
                    return
                if time.monotonic() > limit:
                    self.problems.append(f"proxy: not back {PROXY_LIMIT_S:g} s after {event.fault.value}")
                    return
                time.sleep(_PROXY_CHECK_INTERVAL_S)

        watcher = self._spawn(watch)
        self._begin(event, lambda status: not watcher.is_alive(), f"pid {victim}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return True

    def _stop_proxy(self, event: Event, _: random.Random) -> bool:
        proxy = self.service.front().get("proxy")
        if proxy is None:
            return False
        try:
            pidfd = os.pidfd_open(proxy)
        except ProcessLookupError:
            return False
        strike = self._begin(event, lambda status: False, f"pid {proxy}")

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
            strike.end = time.monotonic()
            self._open = [each for each in self._open if each.strike is not strike]

        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        self._at(STOP_S, go_on)
        return True

    def _kill_daemon(self, event: Event, rng: random.Random) -> bool:
        strike = self._begin(event, lambda status: not self.service.unhealthy(status), f"pid {self.service.pid}")
        self.service.hang_up()
        if self.service.managed:
            # The next daemon adopts the processes, including the damaged ones.
            if rng.random() < 0.5:
                self.service.kill()
            else:
                self.service.terminate()
            self.service.start()
            return True
        children = Watched(self.service.children())
        self.service.kill()
        # All processes exit with the daemon, so their faults are over.
        by_clients = (Fault.FLOOD, Fault.POISON)
        for each in list(self._open):
            if each.strike.fault not in by_clients and each.strike is not strike:
                self._over(each)
        self.service.start()

        def check() -> None:
            survivors = children.survivors()
            if survivors:
                self.problems.append(f"orphans: {survivors} outlive the daemon by {ORPHAN_LIMIT_S:g} s")

        self._at(ORPHAN_LIMIT_S, check)
        return True

    # --- page stores --------------------------------------------------------------------------------------------

    def _damage_store(self, event: Event, rng: random.Random) -> bool:
        store, workers = self._serving_store(event.model)
        if store is None:
            return False
        # A worker that has crashed or no longer serves does not compute with the damaged store any more.
        self._begin(event, self._replaced(event.model, workers), str(store.relative_to(self.service.cache)))
        with contextlib.suppress(FileNotFoundError):
            store.chmod(stat.S_IRUSR | stat.S_IWUSR)
            size = store.stat().st_size
            if event.fault is Fault.TRUNCATE_STORE:
                os.truncate(store, rng.choice([0, size // 2]))
            else:
                with store.open("r+b") as file:
                    file.seek(4096)
                    file.write(rng.randbytes(max(0, size - 4096)))
            store.chmod(stat.S_IRUSR)
        return True

    def _replace_store(self, event: Event, rng: random.Random) -> bool:
        """Replace the page store's file. Processes with the old mapping continue; new ones must reject the new file."""
        store, _ = self._serving_store(event.model)
        if store is None:
            return False
        strike = self._begin(event, _at_once, str(store.relative_to(self.service.cache)))
        with contextlib.suppress(FileNotFoundError):
            new = store.with_name("new")
            new.write_bytes(rng.randbytes(store.stat().st_size))
            new.chmod(stat.S_IRUSR)
            new.rename(store)
        strike.end = time.monotonic()
        return True

    def _serving_store(self, model: str) -> tuple[Path | None, list[ProcessStatus]]:
        """Return the page store of the serving generation, or None, and the processes that map it."""
        status = self._status()
        workers = ready_workers(status, model) if status is not None else []
        serving = [each for each in generations(status, model) if each.state == "serving"] if status is not None else []
        # There are two generations while a changed configuration takes effect.
        if not workers or len(serving) != 1:
            return None, []
        return self.service.store(f"{model}.{serving[0].number}"), workers

    # --- clients ------------------------------------------------------------------------------------------------

    def _ask(self, name: str, model: str, orders: ClientPlan) -> ClientProcess:
        """Start a client that sends requests to this model only."""
        orders = dataclasses.replace(orders, paths={model: str(self.models[model].path)})
        return self.fleet.launch(name, orders)

    def _flood(self, event: Event, rng: random.Random) -> bool:
        count = FLOOD_FACTOR * self.max_queue
        orders = ClientPlan(self._way(rng), {}, f"flood {rng.random()}", in_flight=count, count=count)
        member = self._ask("flood", event.model, orders)
        self._begin(event, lambda status: not member.running and _queued(status, event.model) < self.max_queue)
        return True

    def _kill_client(self, event: Event, rng: random.Random) -> bool:
        number = rng.randrange(len(self.members))
        self._begin(event, _at_once, self.members[number].name)
        self.members[number].kill()
        self.members[number] = self.start_client(number)
        return True

    def _deaf_clients(self, event: Event, rng: random.Random) -> bool:
        count = DEAF_CROWD if event.fault is Fault.DEAF_CROWD else 1
        model = max(self.models.values(), key=lambda each: not each.dense)  # the one with the large tensors
        command = [sys.executable, "-m", "tests.chaos.hostile", self._way(rng), model.name, str(model.path)]
        command += [str(_DEAF_REQUESTS), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=REPOSITORY)
        self._deaf.append(process)
        self._begin(event, lambda status: process.poll() is not None)

        def stop() -> None:
            assert process.stdout
            with process.stdout:
                process.stdout.readline()
            process.send_signal(signal.SIGSTOP)

        self._spawn(stop)
        self._at(DEAF_S, process.kill)
        return True

    def _poison(self, event: Event, rng: random.Random) -> bool:
        event = dataclasses.replace(event, model="tiny")
        orders = ClientPlan(self._way(rng), {}, f"poison {rng.random()}", IN_FLIGHT, POISONS, poisons=True)
        member = self._ask("poison", event.model, orders)
        healthy = self._replaced(event.model, [])
        self._begin(event, lambda status: not member.running and healthy(status))
        return True

    def _garbage(self, event: Event, rng: random.Random) -> bool:
        address = self.service.address
        acts = [
            functools.partial(act, f"{scheme}://{address}", random.Random(rng.random()))
            for scheme, act in _GARBAGE[event.fault].items()
        ]
        threads = [self._spawn(act) for act in acts]
        self._begin(event, lambda status: not any(thread.is_alive() for thread in threads))
        return True

    # --- the operator -------------------------------------------------------------------------------------------

    def _update(self, event: Event, _: random.Random) -> bool:
        model = self.models[event.model]

        def update() -> None:
            # Other faults may abort the update; clients must not notice that.
            with contextlib.suppress(RequestError), Client(self.service.address, timeout=UPDATE_LIMIT_S) as client:
                client.update(model.name, str(model.path))

        thread = self._spawn(update)
        self._begin(event, lambda status: not thread.is_alive())
        return True

    def _unload(self, event: Event, rng: random.Random) -> bool:
        event = dataclasses.replace(event, model=ON_DEMAND)
        pause_s = rng.choice((0.0, rng.uniform(0.0, 2.0)))

        def unload() -> None:
            # Another fault may kill the daemon meanwhile, or the model may be changing.
            with contextlib.suppress(RequestError), Client(self.service.unix_address, timeout=UPDATE_LIMIT_S) as client:
                client.unload(ON_DEMAND)
                time.sleep(pause_s)
                client.load(ON_DEMAND)

        thread = self._spawn(unload)
        self._begin(event, lambda status: not thread.is_alive())
        return True

    def _reload(self, event: Event, rng: random.Random) -> bool:
        if not self.service.listens:
            return False
        # Settings that make the daemon load the model again, and settings that do not.
        anew = {"max_queue": self.max_queue + rng.randrange(2)}
        changes = [anew] if self.models[event.model].table else [anew, {"batching.max_rows": rng.choice((16, 64))}]
        self.service.configure(event.model, rng.choice(changes))
        by_signal = rng.random() < 0.5

        def reload() -> None:
            # Another fault may kill the daemon during the reload.
            with contextlib.suppress(RequestError), Client(self.service.address, timeout=RELOAD_LIMIT_S) as client:
                if not by_signal:
                    client.reload()
                    return
                before = client.metrics().reloads
                self.service.reload()
                end = time.monotonic() + RELOAD_LIMIT_S
                while client.metrics().reloads == before and time.monotonic() < end:
                    time.sleep(0.1)

        thread = self._spawn(reload)
        self._begin(
            event,
            lambda status: (
                not thread.is_alive() and all(each.state == "serving" for each in generations(status, event.model))
            ),
        )
        return True

    # --- helpers ------------------------------------------------------------------------------------------------

    def _way(self, rng: random.Random) -> str:
        return rng.choice((self.service.unix_address, self.service.zmq_address))

    def _begin(self, event: Event, over: _Over, note: str = "") -> Strike:
        strike = Strike(event.fault, event.model, time.monotonic(), note=note)
        self.strikes.append(strike)
        self._open.append(_Open(strike, over))
        return strike

    def _over(self, each: _Open) -> None:
        each.strike.end = time.monotonic()
        self._open.remove(each)

    def _replaced(self, model: str, targets: Sequence[ProcessStatus]) -> _Over:
        gone = _gone(targets)
        return lambda status: gone(status) and model not in self.service.unhealthy(status)

    def _status(self) -> StatusResponse | None:
        try:
            return self.service.status()
        except RequestError:
            return None

    def _at(self, delay: float, act: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + delay, act))

    def _spawn(self, act: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=act, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread


def _at_once(_: StatusResponse) -> bool:
    """Report at once that the effect is over."""
    return True


def _gone(targets: Sequence[ProcessStatus]) -> _Over:
    watched = {each.name for each in targets}
    return lambda status: watched.isdisjoint(
        process.name for model in status.models for process in processes(status, model.name)
    )


def _queued(status: StatusResponse, name: str) -> int:
    return next(model.queued for model in status.models if model.name == name)
