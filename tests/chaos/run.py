"""One run: a daemon, clients and faults, and the check of all counts at the end."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from testkit.waiting import until
from weightd import Client, RequestError
from weightd_daemon.processes.fork_servers import FORK_TIMEOUT_S
from weightd_protocol.messages.status import StatusResponse

from . import guests, material, verdict
from .client import ClientPlan
from .faults import Injector
from .fleet import ClientProcess, ClientProcesses
from .kinds import ON_DEMAND, Fault
from .report import Report, summary
from .resources import MIB, Usage, growth, usage
from .schedule import Event, Target, plan
from .service import KEEPER_LIMIT_S, Service, ServiceError, Watched, workspace
from .verdict import Strike

WORKERS = 2
CLIENTS = 3
IN_FLIGHT = 6
MAX_QUEUE = 64
MAX_MEMORY_BYTES = 256 * MIB

PREDICT_TIMEOUT_S = 2.0
WATCHDOG_S = 2.0
CANARY_INTERVAL_S = 5.0

# Small requests are batched, and large ones are split; the limit of rows exceeds all requests to the elastic model.
# Requests to the tiny model, which is not batched, use direct channels.
ROWS: dict[str, dict[str, int]] = {
    "tiny": {},
    "elastic": {"batching.max_rows": 64, "split.part_rows": 4096, "split.max_rows": 2**20},
    "dense": {"batching.max_rows": 64, "split.part_rows": 128},
}

START_LIMIT_S = 120.0
WARM_UP_S = 5.0
RECOVERY_LIMIT_S = 5.0
SETTLE_LIMIT_S = 40.0
PROGRESS_EVERY_S = 10.0

# Intervals of the health check: short after a fault, else long, because a status costs the daemon milliseconds.
_LOOK_SOON_S = 0.1
_LOOK_S = 1.0

_PROCESS_DIED = 2

# Time until weightd notices a fault, for faults that it does not notice at once.
_PATIENCE = {
    Fault.HANG_WORKER: PREDICT_TIMEOUT_S + WATCHDOG_S,
    Fault.OVERWRITE_STORE: 2 * CANARY_INTERVAL_S,
    # weightd notices at the next fork.
    Fault.STOP_FORK_SERVER: FORK_TIMEOUT_S,
    # The fault is over when its client has exited and each crashed worker is replaced.
    Fault.POISON: 15.0,
}

# Allowed growth from the daemon after its warm-up to the last idle daemon. Memory: the fragments that an allocator
# keeps between used blocks after a trim, which do not grow with time.
_FRAGMENTS = 64 * MIB
TOLERANCE = Usage(fds=4, threads=0, maps=64, rss=_FRAGMENTS, pss=_FRAGMENTS)


@dataclass
class Run:
    """A run of `seconds` under faults.

    Args:
        seed: seed of all random choices; only timing depends on the machine.
        seconds: time from the first fault to the last.
        faults: the faults that may strike.
        managed: whether a daemon that is killed or restarted leaves its processes to the next one, as under systemd.
        recovery_s: time limit after the last fault until every model has all of its workers.
        real_ranks: whether ranks run the real MindSpore; otherwise they run on simulated cards.
    """

    seed: int
    seconds: float
    faults: Collection[Fault]
    managed: bool = False
    recovery_s: float = RECOVERY_LIMIT_S
    real_ranks: bool = False
    _problems: list[str] = field(default_factory=list[str])

    def run(self) -> Report:
        """Run, and return the report. Afterwards the daemon and its descendants have exited."""
        place = workspace("chaos-")
        self._models = {model.name: model for model in material.make(place, self.seed, real_ranks=self.real_ranks)}
        self._guests = {model.name: str(model.path) for model in material.make_guests(place, self.seed)}
        daemon = {
            "max_memory_bytes": MAX_MEMORY_BYTES,
            "max_model_bytes": guests.ROOMY,
            "min_resident": guests.MIN_RESIDENT_S,
        }
        self._service = Service(place, daemon, self._tables(), managed=self.managed)
        self._fleet = ClientProcesses(place)
        self._report = Report(self.seed, self.seconds, self.faults, place, managed=self.managed)
        self._service.start()
        try:
            self._go()
        except (ServiceError, TimeoutError) as error:
            self._problems.append(str(error))
        finally:
            self._fleet.kill()
            self._finish()
        return self._report

    def _tables(self) -> dict[str, dict[str, object]]:
        common = {"max_queue": MAX_QUEUE, "predict_timeout": PREDICT_TIMEOUT_S, "watchdog": WATCHDOG_S}
        whole = {"workers": WORKERS, "selftest_interval": CANARY_INTERVAL_S}
        on_demand = {"load": "on_demand", "idle_unload": 0.0}
        tables: dict[str, dict[str, object]] = {
            each.name: {
                "path": each.path,
                "python": each.python,
                "engine": each.engine,
                **common,
                **(each.table if each.table else {**whole, **ROWS[each.name]}),
                **(on_demand if each.name == ON_DEMAND else {}),
            }
            for each in self._models.values()
        }
        for name, path in self._guests.items():
            tables[name] = {"path": path, **common, **whole, **on_demand}
        return tables

    def _go(self) -> None:
        self._service.await_health(START_LIMIT_S)
        self._warm_up()
        self._limit_memory()
        before = self._held("after the warm-up")
        processes = len(self._service.children())
        self._storm()
        self._problems += self._fleet.end()
        after = self._held("at the end")
        self._problems += [
            f"leak: {name}: {each}" for name in after for each in growth(before[name], after[name], TOLERANCE)
        ]
        if len(self._service.children()) > processes:
            self._problems.append(f"leak: {len(self._service.children())} processes, {processes} before")
        self._problems += guests.unbalanced(self._service.status())
        self._report.evictions = sum(map(guests.evictions, self._service.logs()))
        if not self._report.evictions:
            self._problems.append("budget: no model was evicted, so the run has not tested evictions")
        self._service.keep_logs()
        self._stop()

    # --- phases of a run ----------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Put load on the daemon first, so that one-time allocations do not count as growth."""
        clients = [self._member(number, "warm-up") for number in range(CLIENTS)] + self._launch_guests()
        deadline = time.monotonic() + WARM_UP_S
        while time.monotonic() < deadline and all(member.running for member in clients):
            time.sleep(_LOOK_SOON_S)
        self._problems += self._fleet.end()
        for address in (self._service.unix_address, self._service.zmq_address):
            for name, model in self._models.items():
                orders = ClientPlan(address, {name: str(model.path)}, f"{self.seed}", MAX_QUEUE // 2, 2 * MAX_QUEUE)
                self._problems += self._fleet.launch("warm-up", orders).wait()

    def _limit_memory(self) -> None:
        """Unload the guests, whose needs are measured now, and set a budget in which not all of them have room."""
        budget = guests.budget(self._service.status(), ROWS)
        self._service.limit_memory(budget)
        with Client(self._service.unix_address, timeout=START_LIMIT_S) as client:
            self._unload_guests(client)
            client.reload()
        print(f"budget: {budget / MIB:.1f} MiB", flush=True)

    def _unload_guests(self, client: Client) -> None:
        for name in self._guests:
            client.unload(name)

    def _storm(self) -> None:
        targets = [Target(model.name, model.dense, cut=bool(model.table)) for model in self._models.values()]
        events = plan(self.seed, self.seconds, self.faults, targets)
        members = [self._member(number) for number in range(CLIENTS)]
        self._launch_guests()
        injector = Injector(self._service, self._fleet, self._models, MAX_QUEUE, self._member, members)
        self._report.strikes = injector.strikes
        self._report.skipped = injector.skipped
        try:
            self._weather(injector, events)
            self._recover(injector)
        finally:
            injector.close()
            self._problems += injector.problems

    def _weather(self, injector: Injector, events: list[Event]) -> None:
        begin = look = reported = time.monotonic()
        due = list(events)
        # On a busy machine a fault may take longer than the time to the next one; all faults strike nevertheless.
        while (now := time.monotonic()) < begin + self.seconds or due:
            self._check_alive(injector)
            while due and begin + due[0].at <= now:
                injector.strike(due.pop(0))
                look = now
            if now >= look:
                injector.tick(self._status())
                look = time.monotonic() + (_LOOK_SOON_S if injector.recovering else _LOOK_S)
            if now >= reported:
                print(self._progress(now - begin, injector), flush=True)
                reported += PROGRESS_EVERY_S
            soon = min(look, reported, begin + due[0].at if due else begin + self.seconds)
            time.sleep(max(0.0, soon - time.monotonic()))

    def _recover(self, injector: Injector) -> None:
        """Check that the service recovers soon after the last fault, while clients and running faults continue."""
        last = max((strike.begin for strike in injector.strikes), default=0.0)
        limit = last + self.recovery_s + patience(injector.lasting)

        def healthy() -> bool:
            self._check_alive(injector)
            status = self._status()
            injector.tick(status)
            return status is not None and not self._service.unhealthy(status)

        try:
            until(healthy, "every model has all of its workers", max(0.0, limit - time.monotonic()))
        except (ServiceError, TimeoutError):
            late = self._status()
            sick = ", ".join(self._service.unhealthy(late)) if late else "the daemon, which does not answer"
            self._problems.append(
                f"recovery: {time.monotonic() - last:.1f} s after the last fault, still unhealthy: {sick}"
            )
        until(lambda: healthy() and not injector.busy, "all faults are over", SETTLE_LIMIT_S)

    def _stop(self) -> None:
        children = Watched(self._service.children())
        status = self._service.stop()
        # A daemon waits for its children before it exits. A shim has no parent that waits, and may still be exiting.
        survivors = children.survivors(KEEPER_LIMIT_S if self.managed else 0.0) + sorted(self._service.children())
        # The exit status of a daemon reports unexpected exits of its processes, which the faults have caused.
        if status not in (0, _PROCESS_DIED):
            self._problems.append(f"stop: the daemon exited with status {status}")
        if survivors:
            self._problems.append(f"orphans: {survivors} outlive a daemon that was asked to stop")
        left = self._service.left_behind()
        if left:
            self._problems.append(f"left behind: {', '.join(left)}")

    def _finish(self) -> None:
        report = self._report
        report.sent, report.outcomes = sum(each.sent for each in self._fleet.members), self._fleet.outcomes
        incidents = [incident for member in self._fleet.members for incident in member.incidents]
        self._problems += verdict.illegal(incidents, report.strikes)
        report.problems = self._problems
        if self._problems:
            self._service.keep_logs()
            report.log = self._service.warnings()
            (self._service.workspace / "faults.txt").write_text(report.history(), encoding="utf-8")
        self._service.remove(keep=bool(self._problems))

    # --- helpers ------------------------------------------------------------------------------------------------

    def _held(self, when: str) -> dict[str, Usage]:
        """Wait until the service is idle, with the guests unloaded and all other models loaded; return its use."""
        with Client(self._service.unix_address, timeout=START_LIMIT_S) as client:
            self._unload_guests(client)
            client.load(ON_DEMAND)
        held = self._service.in_quiet(SETTLE_LIMIT_S)
        print(*(f"{name:<7} {when}: {each}" for name, each in held.items()), sep="\n", flush=True)
        return held

    def _member(self, number: int, name: str = "") -> ClientProcess:
        generation = len(self._fleet.members)
        orders = ClientPlan(
            # Each group of clients uses both transports.
            (self._service.unix_address, self._service.zmq_address)[(self.seed + number) % 2],
            {name: str(model.path) for name, model in self._models.items()},
            f"{self.seed} {number} {generation}",
            IN_FLIGHT,
            cancels=Fault.CANCEL in self.faults and not name,
        )
        return self._fleet.launch(name or f"client{number}", orders)

    def _launch_guests(self) -> list[ClientProcess]:
        """Start a client of the guests on each transport."""
        addresses = self._service.unix_address, self._service.zmq_address
        return [
            self._fleet.launch(
                "guests",
                ClientPlan(
                    address,
                    self._guests,
                    f"{self.seed} guests {number}",
                    guests.IN_FLIGHT,
                    cancels=Fault.CANCEL in self.faults,
                    visit=guests.VISIT,
                    pause_s=guests.PAUSE_S,
                ),
            )
            for number, address in enumerate(addresses)
        ]

    def _check_alive(self, injector: Injector) -> None:
        status = self._service.ended()
        if status is not None:
            # The consequences need no separate verdict.
            injector.strikes.append(Strike(Fault.KILL_DAEMON, "", time.monotonic() - _LOOK_S, note="by itself"))
            raise ServiceError(f"the daemon exited unexpectedly with status {status}; its log: {self._service.log}")
        for member in injector.members:
            if not member.running:
                raise ServiceError(f"client {member.name} exited unexpectedly: {', '.join(member.wait())}")

    def _status(self) -> StatusResponse | None:
        try:
            status = self._service.status()
        except RequestError:
            return None
        self._problems += guests.unbalanced(status)
        return status

    def _progress(self, elapsed: float, injector: Injector) -> str:
        ill = sorted({strike.model or "daemon" for strike in injector.recovering})
        try:
            held = usage(self._service.pid).rss // MIB
        except ProcessLookupError:
            held = 0
        line = f"{elapsed:6.0f} s  {len(injector.strikes):5d} faults  {held:4d} MiB  {summary(self._fleet.outcomes)}"
        return f"{line}  recovering: {', '.join(ill)}" if ill else line


def patience(strikes: Iterable[Strike]) -> float:
    """Return the time in which weightd must notice all strikes; one may delay the reaction to another."""
    return sum(_PATIENCE.get(each.fault, 0.0) for each in strikes)
