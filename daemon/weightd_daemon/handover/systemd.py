"""What a service manager gives and wants to know: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from weightd_common import service_manager
from weightd_common.devices import CPU
from weightd_common.log_text import to_one_line
from weightd_common.service_manager import SEND_TIMEOUT_S
from weightd_daemon.config import daemon as forms
from weightd_daemon.config.load import Config
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.models.model import ServedModel
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses, listen_on
from weightd_protocol.codec import clip

_log = logging.getLogger("weightd")

CLIENTS = "clients"
"""FileDescriptorName= of the sockets on which clients connect."""

SHIM = "shim"
CONFIG = "config"
"""Names of descriptors that are kept for the next daemon (FDSTORE=1): a link to the shim, and what was configured."""


class ServiceManager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it: children must not see it.

    Attributes:
        inherited: the descriptors that were passed, by name.
        watchdog_s: seconds within which a sign of life is expected; None if none is.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.watchdog_s = _parse_watchdog(environment)
        self.inherited = _group_by_name(service_manager.take_listen_fds(environment))
        # What could not be told yet.
        self._unsent: dict[str, str] = {}
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    @property
    def is_present(self) -> bool:
        """Whether somebody wants to be notified."""
        return bool(self._address)

    def notify(self, *assignments: str) -> None:
        """Tell it something, such as "READY=1".

        A manager that is busy is told with the next notification, one that does not listen is not: a daemon that serves
        waits for neither.
        """
        for each in assignments:
            key, _, value = each.partition("=")
            self._unsent[key] = value
        if self._unsent:
            message = "\n".join(f"{key}={value}" for key, value in self._unsent.items())
            with contextlib.suppress(BlockingIOError):
                self._send(message, [], 0.0)
                self._unsent.clear()

    def notify_reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        self.notify(*service_manager.reloading_message())

    def store_descriptor(self, name: str, descriptor: int) -> None:
        """Have it hold a duplicate of the descriptor for the next process of this service, in place of any other."""
        self.remove_descriptor(name)
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTORE=1\nFDNAME={name}", [descriptor], SEND_TIMEOUT_S)
            return
        _log.warning("the service manager is busy and does not hold %s: a restart will not go on with that", name)

    def remove_descriptor(self, name: str) -> None:
        """Have it close what it holds under this name."""
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", [], SEND_TIMEOUT_S)

    def _send(self, message: str, descriptors: list[int], timeout_s: float) -> None:
        """Send a message.

        Raises:
            BlockingIOError: its queue, which is short, has been full for so many seconds.
        """
        if not self._address:
            return
        try:
            service_manager.send(self._address, message, descriptors, timeout_s)
        except BlockingIOError:
            raise
        except OSError as error:
            _log.warning("cannot notify the service manager: %s: %s", message.partition("\n")[0], error)


def _parse_watchdog(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None


def _group_by_name(descriptors: Sequence[tuple[int, str]]) -> Mapping[str, list[int]]:
    inherited: dict[str, list[int]] = {}
    for descriptor, name in descriptors:
        # Units that give their sockets no name have them named after the unit, "unknown" in old versions.
        is_own = name in (SHIM, CONFIG) and not _is_listening(descriptor)
        inherited.setdefault(name if is_own else CLIENTS, []).append(descriptor)
    return inherited


def _is_listening(descriptor: int) -> bool:
    """Whether clients connect there: nothing that a daemon has had kept is such a socket, however a unit names it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


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
        self._served_models |= {model.name for model in required if model.is_serving}
        stuck = {model.name for model in required if not self._is_progressing(model, now)}
        if not self.is_ready and all(model.is_serving or self._is_optional(model) for model in required):
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
            model.config.required and model.has_failed and not self._is_optional(model) for model in models
        )

    def _is_optional(self, model: ServedModel) -> bool:
        return model.has_failed and bool(self._resumed_models) and model.name not in self._resumed_models

    def _is_alive(self, model: ServedModel, stuck: Collection[str], now: float) -> bool:
        """Whether a worker answers. A daemon whose loop runs while those that are there do not is of no use to anybody.

        One that loads a model, the first time or again, or replaces its workers, is: as long as that goes on, and the
        pauses between two tries are part of it. What a reload has added and what cannot be loaded says nothing of the
        daemon.
        """
        if model.name not in self._served_models or not model.unready_reason(now):
            return True
        return not _has_workers(model) and not model.has_failed and model.name not in stuck

    def _is_progressing(self, model: ServedModel, now: float) -> bool:
        """Whether a model serves or makes progress, as far as its load_timeout allows to tell."""
        previous = self._progress.get(model.name)
        progress = model.main_generation.progress
        if previous is None or previous[0] != progress:
            self._progress[model.name] = progress, now
            return True
        return _has_workers(model) or now <= previous[1] + model.config.load_timeout + _PROGRESS_TIMEOUT_S


def _has_workers(model: ServedModel) -> bool:
    return model.is_serving and any(
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
        serving += model.is_serving
        workers += sum(len(each.serving.processes.serving) for each in model.deployments if each.serving is not None)
    for doing, count in counts.items():
        yield f"{count} {'model is' if count == 1 else 'models are'} {doing}"
    yield f"serving {serving} models from {workers} workers"


class ListenSockets(NamedTuple):
    """Sockets that listen and do not block.

    Attributes:
        unix_listeners: for clients of this host; none where that could not be had.
        zmq_listeners: for clients that speak ZeroMQ, by the names of their listeners.
        addresses: of all of them.
        metrics_listener: for those who want metrics; None where there is to be none.
    """

    unix_listeners: Sequence[socket.socket]
    zmq_listeners: Mapping[str, socket.socket]
    addresses: Sequence[str]
    metrics_listener: socket.socket | None = None


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
        metrics = config.daemon.metrics
        metrics_listener = stack.enter_context(listen_on(forms.metrics_listen_address(metrics))) if metrics else None
        all_addresses = [*unix_listeners, *(each.address for each in config.listeners.values())]
        yield ListenSockets([*unix_listeners.values()], zmq_listeners, all_addresses, metrics_listener)


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
