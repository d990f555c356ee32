"""What is told of a generation: how it stands, why it has fewer workers than it should, and why it has failed."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weightd_common.devices import CPU
from weightd_daemon.counters import ProcessCounters
from weightd_daemon.generations.actions import Action
from weightd_daemon.generations.attach_control import AttachControl
from weightd_daemon.generations.backoff import RestartBackoff
from weightd_daemon.generations.process import FOREVER, DeviceUsage, GenerationProcesses, WorkerProcess
from weightd_daemon.generations.selftest_search import SelfTestSearch, describe_cases
from weightd_daemon.generations.spec import GenerationSpec, ModelSource
from weightd_daemon.generations.states import (
    ACTIVE,
    ENDED,
    GENERATION_TRANSITIONS,
    ChildState,
    GenerationState,
    Machine,
)
from weightd_daemon.platform.log_setup import subject_extra
from weightd_protocol.messages.worker import Attached, Built

_log = logging.getLogger("weightd.generation")


class RetryHint(enum.Enum):
    """What another generation may expect where one has failed."""

    SAME_FAILURE = "same failure"  # the same end
    WAIT_FOR_MEMORY = "wait for memory"  # there was none on the card, and some may come free late
    MAY_SUCCEED = "may succeed"  # a signal has ended the holder: that may go better the next time


@dataclass(frozen=True)
class FailureReason:
    """Why a generation has failed, or has fewer workers than it should; as text it is for people.

    Attributes:
        reason: what has happened.
        child: to whom, or "".
        log_tail: the last ones of its log, as soon as they are known.
        prefix: what this has led to.
        suffix: what follows from it.
        retry_hint: of the next generation, if this one has failed of it.
        is_transient: whether the cause may go away by itself, at whatever time.
    """

    reason: str = ""
    child: str = ""
    log_tail: str = ""
    prefix: str = ""
    suffix: str = ""
    retry_hint: RetryHint = RetryHint.SAME_FAILURE
    is_transient: bool = False

    def with_prefix(self, prefix_text: str) -> FailureReason:
        """Return it with what it has led to."""
        return replace(self, prefix=f"{prefix_text}{self.prefix}")

    def __str__(self) -> str:
        child = f"{self.child}: " if self.child else ""
        words = f"; its log ends: {self.log_tail}" if self.log_tail else ""
        return f"{self.prefix}{child}{self.reason}{words}{self.suffix}"


class ProgressLogger:
    """Tells of one generation in the log, each thing once.

    Args:
        label: of the generation.
        number: the one in its label.
    """

    def __init__(self, label: str, number: int) -> None:
        self._label = label
        self._number = number
        self._progress = ""
        self._notes: set[str] = set()

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return `extra` of an event of this generation, or of one of its children."""
        return subject_extra(self._label.rpartition(".")[0], self._number, child)

    def log(self, text: str, child: str = "", *, level: int = logging.WARNING) -> None:
        """Tell something, of one of its children or of itself."""
        _log.log(level, "%s: %s", self._label, text, extra=self.log_extra(child))

    def log_progress(self, progress: str, *, has_failed: bool) -> None:
        """One line each time that there is something new; a failure is told by who knows what follows."""
        if progress != self._progress:
            self._progress = progress
            if not has_failed:
                self.log(progress, level=logging.INFO)

    def log_built(self, built: Built, holder: str) -> None:
        """The holder may have nothing for anybody to attach to. That there is nothing to share is no loss."""
        if not (built.handle or built.is_template):
            self._log_unshared(built.note, holder, logging.WARNING if built.has_sharing_failed else logging.INFO)

    def log_row_test(self, built: Built, *, is_exact: bool) -> None:
        """Requests were to be put together, or cut; the model may not be one of which that is right.

        That it was not tested is no loss where answers need not be `is_exact`.
        """
        if built.row_support is not None and built.row_support.note:
            is_loss = is_exact or not built.row_support.outputs
            self.log(f"rows of requests: {built.row_support.note}", level=logging.WARNING if is_loss else logging.INFO)

    def log_attached(self, built: Built, attached: Attached, worker: str) -> None:
        """A worker may not have got what the holder has; that there is nothing, the holder has told."""
        if built.shared_bytes and not attached.shared_bytes:
            self._log_unshared(attached.note, worker, logging.WARNING)

    def _log_unshared(self, note: str, child: str, level: int) -> None:
        """Each cause once, however many workers meet it."""
        note = note or "weights are not shared"
        if note not in self._notes:
            self._notes.add(note)
            self.log(note, child, level=level)


def describe_selftest(built: Built | None) -> str:
    """Return what the self-test of a model is run on, or why it has none; "" before that is known. For people."""
    if built is None:
        return ""
    return describe_cases(built.selftest_cases) if built.selftest_digest else f"none: {built.selftest_note}"


def single_attach() -> int:
    """Let workers attach in this way: right wherever nothing is known of the room that there is."""
    return 1


class UnmergedPrincipal(NamedTuple):
    """A tenant or a user whose requests are not put together with others any more.

    Attributes:
        name: of the tenant or the user.
        note: what has differed.
    """

    name: str
    note: str


class GenerationView:
    """How a generation stands: what it has, and what can be asked of it. Nothing here changes anything.

    Args:
        label: its name, the model's and a number that is never used again.
        spec: what is configured.
        device: where it lives. Its workers are there, or on the devices of its terms.
        source: what it loads.
        number: the one in its label.

    Attributes:
        children: every child that is alive, by name, in the order in which they were started.
        serving_processes: the workers that take requests; the other ones that are READY are spares.
        processes: both, and what can be done with them.
        attach_control: who may attach, and whether answers count.
        sha256: of the model, once the snapshot is taken.
        built: what the holder exported, once it has.
        unmerged_principals: tenants and users whose rows were found to differ when they were run with others, by their
            numbers.
        device_usage: what one process takes on the card beside the weights.
        deaths: processes that ended, or had to be ended, without being asked to.
        selftest_search: what is known of its self-test.
        counters: of its processes are counted there.
        attach_limit: returns how many workers may attach at the same time; at least one.
    """

    _processes_type: type[GenerationProcesses] = GenerationProcesses

    def __init__(
        self, label: str, spec: GenerationSpec, device: str = CPU, source: ModelSource | None = None, number: int = 1
    ) -> None:
        self.label = label
        self.spec = spec
        self.device = device
        self.source = source or ModelSource("")
        self.number = number
        self.sha256 = ""
        self.built: Built | None = None
        self.unmerged_principals: dict[int, UnmergedPrincipal] = {}
        self.deaths: int = 0
        self.counters = ProcessCounters()
        self.selftest_search = SelfTestSearch(spec.selftest, spec.row_test)
        self.attach_limit: Callable[[], int] = single_attach
        self.device_usage = DeviceUsage()
        self._actions: list[Action] = []
        self._progress_logger = ProgressLogger(label, number)
        self.processes = self._processes_type(label, self._actions.append, self.log_extra)
        self.attach_control = AttachControl(
            label, self.processes, self._actions.append, self._progress_logger.log, self.log_extra()
        )
        self.children = self.processes.children
        self.serving_processes = self.processes.serving_processes
        self._machine = Machine(GENERATION_TRANSITIONS, GenerationState.SNAPSHOTTING, label, self.log_extra())
        self._failure_reason = FailureReason()
        self._backoff = RestartBackoff()

    @property
    def state(self) -> GenerationState:
        """Where it is."""
        return self._machine.state

    @property
    def cause(self) -> str:
        """Why it failed, or why it has fewer workers than it should, for people."""
        return str(self._failure_reason)

    @property
    def retry_hint(self) -> RetryHint:
        """What the next one may expect, if this one has failed."""
        return self._failure_reason.retry_hint

    @property
    def is_transient(self) -> bool:
        """Whether the cause of its failure may go away by itself."""
        return self._failure_reason.is_transient

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in order, and forget it."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    @property
    def next_tick_at(self) -> float:
        """When `tick` is due, in monotonic seconds."""
        due_at = min((child.deadline for child in self.children.values()), default=FOREVER)
        due_at = min(due_at, self.attach_control.deadline) if self.state in ACTIVE else due_at
        return min(due_at, self._backoff.due_at) if self._missing_devices else due_at

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left of it."""
        return self.state in ENDED and not self.children

    @property
    def is_complete(self) -> bool:
        """Whether it serves with all the workers that it should have, or that it can have for now."""
        return self._has_served and self._is_attaching_done

    @property
    def is_reconnecting(self) -> bool:
        """Whether it was resumed, and a worker may still reconnect."""
        return self.state in ACTIVE and self.processes.count(ChildState.AWAITED) > 0

    @property
    def has_all_workers(self) -> bool:
        """Whether all workers and spares that it should have are READY."""
        return self.processes.count(ChildState.READY) == self.spec.process_count

    @property
    def should_be_replaced(self) -> bool:
        """Whether it has lost workers that only another generation can replace."""
        if self.state is not GenerationState.SERVING or not self.attach_control.is_attach_closed:
            return False
        workers_by_device = self.processes.workers_by_device()
        return self.attach_control.is_frozen or any(
            workers_by_device[device] < self.spec.workers for device in self._devices
        )

    @property
    def slots(self) -> Mapping[str, tuple[str, ...]]:
        """The slots that take requests, by name: of which processes each is, in their order."""
        return {name: (name,) for name in self.serving_processes}

    @property
    def ready_workers(self) -> list[str]:
        """The workers and spares that are READY, by name."""
        return [child.name for child in self.children.values() if child.state is ChildState.READY]

    @property
    def progress(self) -> str:
        """What it is doing now, for people."""
        ready_count, wanted_count = self.processes.count(ChildState.READY), self.spec.process_count
        if self.state in (GenerationState.SPAWNING, GenerationState.GATHERING):
            hello_count = sum(child.hello is not None for child in self.children.values())
            return f"spawned, {hello_count}/{1 if self.spec.can_fork_from_holder else wanted_count + 1} processes up"
        if self.attach_control.is_frozen and self._has_served:
            return f"serving {ready_count}/{wanted_count}, frozen: the holder is lost"
        if self.attach_control.is_attach_closed and self._has_served and ready_count < wanted_count:
            return f"serving {ready_count}/{wanted_count}, nobody can attach any more"
        if (
            self.state in (GenerationState.ATTACHING, GenerationState.RESUMING, GenerationState.SERVING)
            and ready_count < wanted_count
        ):
            return (
                f"serving {ready_count}/{wanted_count}, backing off"
                if self._is_backing_off
                else f"attaching {ready_count}/{wanted_count}"
            )
        return self.state.display_name

    @property
    def selftest_description(self) -> str:
        """What its self-test is run on, or why it has none; "" before that is known. For people."""
        return describe_selftest(self.built)

    def log_extra(self, child: str = "") -> Mapping[str, Any]:
        """Return `extra` of an event of this generation, or of one of its children."""
        return self._progress_logger.log_extra(child)

    def alive(self) -> Iterator[WorkerProcess]:
        """Yield the children that have a process."""
        return self.processes.alive()

    # --- for its decisions --------------------------------------------------------------------------------------

    @property
    def _has_served(self) -> bool:
        """Whether it does, or did before its workers were lost: it is tried for ever to have others."""
        return self.state is GenerationState.SERVING

    @property
    def _is_backing_off(self) -> bool:
        """Whether the next worker is not started at once."""
        return self._has_served and bool(self._missing_devices) and self._backoff.delay_s > 0

    @property
    def _has_given_up(self) -> bool:
        """Whether none of its workers has ever been READY, and none will be."""
        return self._backoff.is_exhausted and not self._has_served

    @property
    def _devices(self) -> tuple[str, ...]:
        """On which its workers are."""
        return self.spec.devices or (self.device,)

    @property
    def _missing_devices(self) -> Sequence[str]:
        """Where a worker is to be started: the device of each, in turn."""
        if (
            self.state not in ACTIVE
            or self.state is GenerationState.SNAPSHOTTING
            or self._has_given_up
            or self.attach_control.is_attach_closed
        ):
            return ()
        if self.spec.can_fork_from_holder and self.built is None:
            return ()
        workers_by_device = self.processes.workers_by_device()
        if workers_by_device.total() == self.spec.process_count:
            return ()
        numbers = range(self.spec.processes_per_device)
        return [device for number in numbers for device in self._devices if workers_by_device[device] <= number]

    @property
    def _is_attaching_done(self) -> bool:
        """Whether no attach is under way, and none is due or worth waiting for."""
        return self._backoff.is_exhausted or not (self._missing_devices or not self.processes.is_all_ready)

    @property
    def _is_sharing(self) -> bool:
        """Whether workers attach to what the holder builds, as far as it is known."""
        return self.spec.is_sharing and (self.built is None or bool(self.built.handle) or self.built.is_template)

    @property
    def _attach_timeout_s(self) -> float:
        """Seconds that an attach may take. Who is forked of a template has built: it only runs the self-test."""
        is_forked = self.built is not None and self.built.is_template
        return min(self.spec.load_timeout, self.spec.predict_timeout) if is_forked else self.spec.load_timeout

    @property
    def _template_name(self) -> str:
        """The holder that workers are forked of, "" where they are not."""
        holder = self.processes.holder
        return holder.name if holder is not None and self.attach_control.is_fork_only else ""
