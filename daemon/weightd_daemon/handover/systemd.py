"""The daemon under a service manager: the sockets that it passes, what it is told, and what the next daemon finds.

`SystemdNotifier` decides what to tell; `ManagedService` tells it, and writes the handover file first.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weightd_common.devices import CPU
from weightd_common.log_text import to_one_line
from weightd_common.service_manager import ServiceManager
from weightd_daemon.config.load import Config
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.handover import state
from weightd_daemon.handover.shim_launcher import ShimLauncher
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import DeviceRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.observability.load_progress import LoadMonitor
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.platform.listen import listen_addresses, listen_on
from weightd_daemon.processes.supervisor import ProcessSupervisor
from weightd_daemon.shutdown import Shutdown
from weightd_protocol.codec import clip

_log = logging.getLogger("weightd")

# How often it is looked at what weightd is doing: for people, who read it now and then.
_STATUS_INTERVAL_S = 1.0

# A start is given this much more time at each look at it that finds it going on.
_EXTENSION_S = 15.0

# Beside copying and building, which load_timeout bounds: waiting for room is not bounded but by this.
_PROGRESS_TIMEOUT_S = 120.0

# Three signs of life in the time in which one is expected.
_WATCHDOG_DIVISOR = 3

# systemd ignores a datagram of more than 4096 bytes, whatever else is in it.
_MAX_STATUS_BYTES = 1024

_CONFIG_NOTE = "the configuration file is not in force, see weightctl status"


class SystemdNotifier:
    """Times are monotonic seconds.

    Args:
        watchdog_s: seconds within which a sign of life is expected; None if none is.

    Attributes:
        is_ready: whether every required model has served, but for new ones that failed where others went on.
        next_event_at: nothing is due before this, unless a model changes.
    """

    def __init__(self, watchdog_s: float | None) -> None:
        self.is_ready = False
        self.next_event_at = 0.0
        self._watchdog_interval_s = watchdog_s / _WATCHDOG_DIVISOR if watchdog_s is not None else float("inf")
        self._next_watchdog_at = 0.0 if watchdog_s is not None else float("inf")
        self._status = ""
        # The required models that have served: only what has been there can be missing.
        self._served_models: set[str] = set()
        # What a daemon before this one has served, and this one goes on with.
        self._resumed_models: frozenset[str] = frozenset()
        # Of each model: what it is doing, and since when.
        self._progress: dict[str, tuple[str, float]] = {}

    def on_resumed(self, models: Iterable[str]) -> None:
        """These serve already: what is new beside them and cannot be loaded is no reason to end them."""
        self._resumed_models = frozenset(models)

    def on_suspended(self, seconds: float) -> None:
        """The process did not run for so long: the manager's time went on."""
        self._next_watchdog_at -= seconds

    def poll(
        self,
        models: Iterable[ServedModel],
        now: float,
        note: str = "",
        load_progress: Callable[[GenerationBase], str] = lambda _: "",
    ) -> list[str]:
        """Return what is to be told now: for people whether there is a `note`, and how far models are that load.

        Every user of the host may read the status text of systemd: it names no model, path or cause.
        """
        models = list(models)
        assignments: list[str] = []
        required = [model for model in models if model.config.required]
        self._served_models &= {model.name for model in required}
        self._served_models |= {model.name for model in required if model.readiness.is_serving}
        stuck = {model.name for model in required if not self._is_progressing(model, now)}
        if not self.is_ready and all(model.readiness.is_serving or self._is_optional(model) for model in required):
            self.is_ready = True
            assignments.append("READY=1")
        if not self.is_ready and not stuck:
            assignments.append(f"EXTEND_TIMEOUT_USEC={int(1e6 * _EXTENSION_S)}")
        if (
            self.is_ready
            and now >= self._next_watchdog_at
            and all(self._is_alive(model, stuck, now) for model in required)
        ):
            self._next_watchdog_at = now + self._watchdog_interval_s
            assignments.append("WATCHDOG=1")
        status = clip(
            to_one_line("; ".join([*([_CONFIG_NOTE] if note else []), *_describe_activity(models, load_progress)])),
            _MAX_STATUS_BYTES,
        )
        if status != self._status:
            self._status = status
            assignments.append(f"STATUS={status}")
        self.next_event_at = now + min(_STATUS_INTERVAL_S, self._watchdog_interval_s)
        return assignments

    def has_failed(self, models: Iterable[ServedModel]) -> bool:
        """Return whether weightd will never be ready."""
        return not self.is_ready and any(
            model.config.required and model.readiness.has_failed and not self._is_optional(model) for model in models
        )

    def _is_optional(self, model: ServedModel) -> bool:
        return model.readiness.has_failed and bool(self._resumed_models) and model.name not in self._resumed_models

    def _is_alive(self, model: ServedModel, stuck: Collection[str], now: float) -> bool:
        """Whether a worker answers. A daemon whose loop runs while those that are there do not is of no use to anybody.

        One that loads a model, the first time or again, or replaces its workers, is: as long as that goes on, and the
        pauses between two tries are part of it. What a reload has added and what cannot be loaded says nothing of the
        daemon.
        """
        if model.name not in self._served_models or not model.readiness.unready_reason(now):
            return True
        return not _has_workers(model) and not model.readiness.has_failed and model.name not in stuck

    def _is_progressing(self, model: ServedModel, now: float) -> bool:
        """Whether a model serves or makes progress, as far as its load_timeout allows to tell."""
        previous = self._progress.get(model.name)
        progress = model.readiness.main_generation.progress
        if previous is None or previous[0] != progress:
            self._progress[model.name] = progress, now
            return True
        return _has_workers(model) or now <= previous[1] + model.config.load_timeout + _PROGRESS_TIMEOUT_S


def _has_workers(model: ServedModel) -> bool:
    return model.readiness.is_serving and any(
        each.serving is not None and each.serving.processes.serving for each in model.deployments
    )


def _describe_activity(models: Iterable[ServedModel], load_progress: Callable[[GenerationBase], str]) -> Iterator[str]:
    counts: Counter[str] = Counter()
    serving = 0
    workers = 0
    for model in models:
        for deployment in model.deployments:
            main = deployment.main_generation
            where = "" if main.device == CPU else f" on {main.device}"
            if main.progress != "serving":
                counts[", ".join(filter(None, [main.progress + where, load_progress(main)]))] += 1
        serving += model.readiness.is_serving
        workers += sum(len(each.serving.processes.serving) for each in model.deployments if each.serving is not None)
    for doing, count in counts.items():
        yield f"{count} {'model is' if count == 1 else 'models are'} {doing}"
    yield f"serving {serving} models from {workers} workers"


class ManagedService:
    """Keeps a service manager informed, and the handover file up to date for the next daemon of the service.

    Args:
        manager: is informed.
        shim: holds the children, and has the directory of the handover file.
        registry: the models.
        supervisor: knows when a child or a generation has changed.
        devices: the devices that models use, by name.
        load_monitor: knows how far models are that load.
        shutdown: once it has begun, there are no more signs of life.
        config_note: returns why what is in force is not what the configuration file says, or "".
        on_failed: called when a required model can never serve.

    Attributes:
        timer: call it when it is due.
    """

    def __init__(  # noqa: PLR0913
        self,
        manager: ServiceManager,
        shim: ShimLauncher,
        registry: ModelRegistry,
        supervisor: ProcessSupervisor,
        devices: Mapping[str, DeviceBudget],
        *,
        load_monitor: LoadMonitor,
        shutdown: Shutdown,
        config_note: Callable[[], str],
        on_failed: Callable[[float], object],
    ) -> None:
        self._manager = manager
        self._shim = shim
        self._registry = registry
        self._supervisor = supervisor
        self._devices = devices
        self._load_monitor = load_monitor
        self._shutdown = shutdown
        self._config_note = config_note
        self._on_failed = on_failed
        self._notifier = SystemdNotifier(manager.watchdog_s)
        self.timer = Timer(self._on_timer)

    def start(self, resumed_models: Iterable[str]) -> None:
        """Give the first sign of life; `resumed_models` were served by the daemon before this one."""
        self._notifier.on_resumed(resumed_models)
        self.timer.set(0.0)

    def on_change(self, now: float) -> None:
        """Something may have changed: write that for the next daemon before anybody is told."""
        if self._supervisor.take_changed():
            self._write_handover()
            self._notify(now)

    def on_suspended(self, seconds: float, now: float) -> None:
        """The process did not run for so long: the manager's time went on."""
        self._notifier.on_suspended(seconds)
        self.timer.set(now)

    def begin_reload(self) -> bool:
        """Tell the manager that a reload begins; return whether `end_reload` is to be called."""
        # READY=1 ends a reload, and a start: before that is over nothing is said of a reload.
        should_notify = self._notifier.is_ready and not self._shutdown.has_begun
        if should_notify:
            self._manager.notify_reloading()
        return should_notify

    def end_reload(self) -> None:
        """Tell the manager that the reload has ended, however it did."""
        self._manager.notify("READY=1")

    def _on_timer(self, now: float) -> None:
        """It is time for a sign of life; the next daemon comes first."""
        if self._supervisor.take_changed():
            self._write_handover()
        self._notify(now)

    def _write_handover(self) -> None:
        if not self._shutdown.is_stopping:
            devices = [DeviceRecord(each.name, each.reported_bytes, each.free_bytes) for each in self._devices.values()]
            state.write(self._shim.handover_path, self._registry.records(), devices)

    def _notify(self, now: float) -> None:
        if self._shutdown.has_begun:
            return
        self._load_monitor.update(self._registry.all_models(), now)
        models = self._registry.models.values()
        assignments = self._notifier.poll(
            models, now, self._config_note(), lambda each: self._load_monitor.describe_progress(each.label, now)
        )
        self._manager.notify(*assignments)
        self.timer.set(self._notifier.next_event_at)
        if self._notifier.has_failed(models):
            _log.error("a required model has failed")
            self._on_failed(now)


class ListenSockets(NamedTuple):
    """Sockets that listen and do not block.

    Attributes:
        unix_listeners: for clients of this host; none where that could not be had.
        zmq_listeners: for clients that speak ZeroMQ, by the names of their listeners.
        addresses: of all of them.
    """

    unix_listeners: Sequence[socket.socket]
    zmq_listeners: Mapping[str, socket.socket]
    addresses: Sequence[str]


@contextlib.contextmanager
def listen(config: Config, passed: Sequence[int], *, with_unix: bool = True) -> Generator[ListenSockets, None, None]:
    """Listen within the block wherever the configuration says, and leave no path behind but those of others.

    Args:
        config: complete, made for what was passed.
        passed: descriptors that a service manager has passed; they are closed in the end.
        with_unix: whether clients of this host may connect without ZeroMQ.

    Raises:
        PathInUse: a socket cannot be had.
    """
    with contextlib.ExitStack() as stack:
        passed_listeners = _adopt_passed(passed, stack)
        unix_listeners = {address: each for address, each in passed_listeners.items() if address.startswith("unix://")}
        if with_unix and not unix_listeners:
            unix_listeners = _listen_unix(f"unix://{config.daemon.unix_socket}", stack, is_required=not passed)
        zmq_listeners = {
            name: passed_listeners.get(each.address) or stack.enter_context(listen_on(each.address))
            for name, each in config.listeners.items()
        }
        all_addresses = [*unix_listeners, *(each.address for each in config.listeners.values())]
        yield ListenSockets([*unix_listeners.values()], zmq_listeners, all_addresses)


def _adopt_passed(passed: Sequence[int], stack: contextlib.ExitStack) -> dict[str, socket.socket]:
    found: dict[str, socket.socket] = {}
    for address, descriptor in zip(listen_addresses(passed), passed, strict=True):
        found[address] = stack.enter_context(socket.socket(fileno=descriptor))
        # Whoever else accepts from it, in this process or another one, may have been faster.
        found[address].setblocking(False)
    return found


def _listen_unix(address: str, stack: contextlib.ExitStack, *, is_required: bool) -> dict[str, socket.socket]:
    """Listen for clients of this host; where a service manager listens for others they can do without it."""
    try:
        return {address: stack.enter_context(listen_on(address))}
    except PathInUse as error:
        if is_required:
            raise
        _log.warning("clients of this host have to speak ZeroMQ, which is slower: %s; see weightd.socket", error)
        return {}
