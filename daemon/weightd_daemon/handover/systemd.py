"""weightd as a systemd service: the sockets that the service manager passes, and the notifications to the manager.

`SystemdNotifier` decides which notifications to send. `ManagedService` sends them, after it has written the state file
for the next daemon.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from weightd_common.devices import CPU
from weightd_common.log_text import plural, to_one_line
from weightd_common.service_manager import ServiceManager
from weightd_daemon.config.load import Config
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.handover import state
from weightd_daemon.handover.shim_launcher import ShimLauncher
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import DeviceRecord, RolloutRecord
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

# Seconds between two updates of the service's status text, which people read in `systemctl status`.
_STATUS_INTERVAL_S = 1.0

# Seconds by which each update of the status text extends the time-out of the start (EXTEND_TIMEOUT_USEC) while required
# models load.
_EXTENSION_S = 15.0

# Seconds without progress, beyond its `load_timeout`, after which a loading model counts as stuck. A model makes no
# progress, for example, while it waits for memory.
_PROGRESS_TIMEOUT_S = 120.0

# Number of watchdog notifications that the daemon sends in the time in which the service manager expects one.
_WATCHDOG_DIVISOR = 3

# Maximum bytes of the status text. systemd ignores a datagram of more than 4096 bytes with all its assignments.
_MAX_STATUS_BYTES = 1024

_CONFIG_NOTE = "the configuration file is not in force, see weightctl status"


class SystemdNotifier:
    """Decides which notifications to send to the service manager. Times are monotonic seconds.

    Args:
        watchdog_s: the seconds within which the service manager expects a watchdog notification; None without a
            watchdog.

    Attributes:
        is_ready: whether READY=1 was sent. It is sent once every required model serves. If models were taken over from
            the previous daemon, required models that are new and have failed do not count.
        next_event_at: the latest time of the next call of `poll`. A change of a model requires an earlier call.
    """

    def __init__(self, watchdog_s: float | None) -> None:
        self.is_ready = False
        self.next_event_at = 0.0
        self._watchdog_interval_s = watchdog_s / _WATCHDOG_DIVISOR if watchdog_s is not None else float("inf")
        self._next_watchdog_at = 0.0 if watchdog_s is not None else float("inf")
        self._status = ""
        # The names of the required models that have served. The daemon stops watchdog notifications only because of one
        # of these models.
        self._served_models: set[str] = set()
        # The names of the models that were serving in the previous daemon and that this daemon continues to serve.
        self._resumed_models: frozenset[str] = frozenset()
        # For each model, by name: its last progress text, and the time of the last change of this text.
        self._progress: dict[str, tuple[str, float]] = {}

    def on_resumed(self, models: Iterable[str]) -> None:
        """Record the models that were taken over from the previous daemon.

        If any model was taken over, a new model that cannot be loaded does not make the service fail.
        """
        self._resumed_models = frozenset(models)

    def on_suspended(self, seconds: float) -> None:
        """Make the next watchdog notification due earlier by the seconds for which this process was suspended."""
        self._next_watchdog_at -= seconds

    def poll(
        self,
        models: Iterable[ServedModel],
        now: float,
        note: str = "",
        load_progress: Callable[[GenerationBase], str] = lambda _: "",
    ) -> list[str]:
        """Return the assignments to send now, such as "READY=1".

        Every user of the host can read the status text of a service, so it contains no model names, paths or errors.

        Args:
            models: all models.
            now: the time.
            note: why the daemon does not use the current content of the configuration file, or "". The status text
                shows only that there is a reason.
            load_progress: returns the progress of a loading generation as a text.
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
        """Return whether the service can never become ready, because a required model has failed."""
        return not self.is_ready and any(
            model.config.required and model.readiness.has_failed and not self._is_optional(model) for model in models
        )

    def _is_optional(self, model: ServedModel) -> bool:
        return model.readiness.has_failed and bool(self._resumed_models) and model.name not in self._resumed_models

    def _is_alive(self, model: ServedModel, stuck: Collection[str], now: float) -> bool:
        """Return whether the state of this model permits watchdog notifications.

        It does if a worker of the model answers, or if the model is being loaded and makes progress or pauses between
        two attempts. It also does if the model has never served: if a reload has added a model that cannot be loaded,
        this is no reason to restart the service.
        """
        if model.name not in self._served_models or not model.readiness.unready_reason(now):
            return True
        return not _has_workers(model) and not model.readiness.has_failed and model.name not in stuck

    def _is_progressing(self, model: ServedModel, now: float) -> bool:
        """Return whether a model has workers, or its progress text has changed recently.

        Recently means within the model's `load_timeout` and another `_PROGRESS_TIMEOUT_S` seconds.
        """
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
    unloaded = 0
    for model in models:
        if model.loading.is_unloaded:
            unloaded += 1
            continue
        for deployment in model.deployments:
            main = deployment.main_generation
            where = "" if main.device == CPU else f" on {main.device}"
            if main.progress != "serving":
                counts[", ".join(filter(None, [main.progress + where, load_progress(main)]))] += 1
        serving += model.readiness.is_serving
        workers += sum(len(each.serving.processes.serving) for each in model.deployments if each.serving is not None)
    for doing, count in counts.items():
        yield f"{count} {'model is' if count == 1 else 'models are'} {doing}"
    if unloaded:
        yield f"{plural(unloaded, 'model')} not loaded"
    yield f"serving {serving} models from {workers} workers"


class ManagedService:
    """Sends notifications to a service manager, and keeps the state file for the next daemon up to date.

    Args:
        manager: the service manager, which receives the notifications.
        shim: the launcher of the shim, which knows the path of the state file.
        registry: the models.
        supervisor: records whether children or generations have changed.
        devices: the devices of the models, by name.
        rollout_records: returns the rollouts in progress.
        load_monitor: measures the progress of loading models.
        shutdown: the shutdown of the daemon. After it has begun, no notifications are sent.
        config_note: returns why the daemon does not use the current content of the configuration file; "" if it does.
        on_failed: called with the current time if the service can never become ready.

    Attributes:
        timer: triggers the next notifications.
    """

    def __init__(  # noqa: PLR0913
        self,
        manager: ServiceManager,
        shim: ShimLauncher,
        registry: ModelRegistry,
        supervisor: ProcessSupervisor,
        devices: Mapping[str, DeviceBudget],
        *,
        rollout_records: Callable[[], Sequence[RolloutRecord]],
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
        self._rollout_records = rollout_records
        self._load_monitor = load_monitor
        self._shutdown = shutdown
        self._config_note = config_note
        self._on_failed = on_failed
        self._notifier = SystemdNotifier(manager.watchdog_s)
        self.timer = Timer(self._on_timer)

    def start(self, resumed_models: Iterable[str]) -> None:
        """Start the notifications. `resumed_models` are the names of the models taken over from the previous daemon."""
        self._notifier.on_resumed(resumed_models)
        self.timer.set(0.0)

    def on_change(self, now: float) -> None:
        """Write the state file and notify the service manager, if a child or a generation has changed."""
        if self._supervisor.take_changed():
            self._write_handover()
            self._notify(now)

    def on_suspended(self, seconds: float, now: float) -> None:
        """Notify at once: this process was suspended for `seconds`, but the service manager's clock went on."""
        self._notifier.on_suspended(seconds)
        self.timer.set(now)

    def begin_reload(self) -> bool:
        """Notify the service manager that a reload begins; return whether `end_reload` has to be called."""
        # Do not notify the service manager of a reload during the start: the READY=1 at the end of the reload would
        # also end the start.
        should_notify = self._notifier.is_ready and not self._shutdown.has_begun
        if should_notify:
            self._manager.notify_reloading()
        return should_notify

    def end_reload(self) -> None:
        """Notify the service manager that the reload has ended, successfully or not."""
        self._manager.notify("READY=1")

    def _on_timer(self, now: float) -> None:
        """Write the state file if it is outdated, then send the notifications that are due."""
        if self._supervisor.take_changed():
            self._write_handover()
        self._notify(now)

    def _write_handover(self) -> None:
        if not self._shutdown.is_stopping:
            devices = [DeviceRecord(each.name, each.reported_bytes, each.free_bytes) for each in self._devices.values()]
            records, rollouts = self._registry.records(), self._rollout_records()
            state.write(self._shim.handover_path, records, devices, rollouts)

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
    """Non-blocking listening sockets.

    Attributes:
        unix_listeners: the Unix sockets for clients of this host; empty if no Unix socket can be used.
        zmq_listeners: the sockets for ZeroMQ clients, by the name of their listener in the configuration.
        addresses: the addresses of all sockets.
    """

    unix_listeners: Sequence[socket.socket]
    zmq_listeners: Mapping[str, socket.socket]
    addresses: Sequence[str]


@contextlib.contextmanager
def listen(config: Config, passed: Sequence[int], *, with_unix: bool = True) -> Generator[ListenSockets, None, None]:
    """Listen on all configured addresses within the block; then close the sockets and remove their paths.

    The paths of sockets that the service manager has passed are not removed.

    Args:
        config: the complete configuration, which has a listener for each ZeroMQ socket in `passed`.
        passed: the descriptors of the sockets that the service manager has passed; they are closed after the block.
        with_unix: whether to listen on a Unix socket for clients of this host.

    Raises:
        PathInUse: a socket cannot be used.
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
        # Another process may share this socket and accept a connection before this process does. The `accept` of this
        # process must then not block.
        found[address].setblocking(False)
    return found


def _listen_unix(address: str, stack: contextlib.ExitStack, *, is_required: bool) -> dict[str, socket.socket]:
    """Listen on a Unix socket. Without `is_required`, a failure is only logged, because clients can use ZeroMQ."""
    try:
        return {address: stack.enter_context(listen_on(address))}
    except PathInUse as error:
        if is_required:
            raise
        _log.warning("clients on this host must use ZeroMQ, which is slower: %s; see weightd.socket", error)
        return {}
