"""What every generation can be told, whatever its processes are: a holder and its workers, or a unit."""

from __future__ import annotations

import abc

from weightd_daemon.generations.actions import TakeSnapshot
from weightd_daemon.generations.progress import FailureReason, GenerationView
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.generations.states import ChildState, GenerationEvent, GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import Hello, ProcessFailed
from weightd_protocol.version import VERSION

# An interpreter on a loaded machine needs seconds to import an engine. What comes before HELLO beside that, CANN's
# import and the digest of the model, may take as long as a build.
HELLO_TIMEOUT_S = 60.0

# A child that was told to stop only has to answer what it is computing.
STOP_TIMEOUT_S = 10.0


class GenerationBase(GenerationView, abc.ABC):
    """The life of a generation: events and the clock go in, `Action`s come out. `GenerationView` says how it stands."""

    _stop_timeout_s = STOP_TIMEOUT_S

    def start(self) -> None:
        """Begin."""
        self._actions.append(TakeSnapshot())
        self._log_progress()

    def on_resumed(self) -> None:
        """It was made of what an earlier daemon has written down; it serves once its processes are `on_reconnected`."""
        self._machine.advance(GenerationEvent.RESUME)

    @abc.abstractmethod
    def on_snapshot_taken(
        self, sha256: str, now: float, selftest: SelfTestSpec | None = None, slice_digests: tuple[str, ...] = ()
    ) -> None:
        """The snapshot exists: start the processes.

        Args:
            sha256: of the model.
            now: the clock.
            selftest: what an earlier generation has found out of it.
            slice_digests: of what each rank loads, where the model is cut.
        """

    def fail(self, cause: str, now: float, *, is_transient: bool = False) -> None:
        """It cannot go on, for `cause`: everything that runs is wound down."""
        self._fail(FailureReason(cause, is_transient=is_transient), now)

    def give_up(self, consequence: str, now: float) -> None:
        """Its cause has led to this: everything that runs is wound down."""
        self._fail(self._failure_reason.with_prefix(f"{consequence}: "), now)

    @abc.abstractmethod
    def on_hello(self, name: str, hello: Hello, now: float) -> None:
        """A child is up."""

    @abc.abstractmethod
    def on_reconnected(self, name: str, now: float, step: int = 0) -> None:
        """A child that was READY for the daemon before this one is connected; `step` is the last one it has run."""

    @abc.abstractmethod
    def on_process_failed(self, name: str, failure: ProcessFailed, now: float) -> None:
        """A child says that it cannot do what it is for."""

    @abc.abstractmethod
    def on_leaving(self, name: str, now: float, reason: str = "") -> None:
        """A child's model may be spoilt, for a predict has failed for this reason: it must go."""

    @abc.abstractmethod
    def on_hung(self, name: str, reason: str, now: float, *, has_answered: bool = False) -> None:
        """A child does not answer any more. `has_answered`: it had answered something."""

    @abc.abstractmethod
    def on_exit(self, name: str, exit_cause: ExitCause, now: float, *, has_answered: bool = False) -> None:
        """A child has exited and has been waited for. `has_answered`: it had answered some request."""

    @abc.abstractmethod
    def drain(self, now: float, *, timeout_s: float = 0.0) -> None:
        """No new work: wind down; to finish what they have, its processes may take `timeout_s` seconds more."""

    @abc.abstractmethod
    def tick(self, now: float) -> None:
        """Time has passed."""

    @abc.abstractmethod
    def _fail(self, cause: FailureReason, now: float) -> None:
        """It cannot go on."""

    def _limit_stop_deadlines(self, now: float, timeout_s: float) -> None:
        """Who was told to leave, and who will be, may take as long, and no one longer than he was given."""
        self._stop_timeout_s = STOP_TIMEOUT_S + timeout_s
        for child in self.children.values():
            if child.state is ChildState.STOPPING:
                child.deadline = min(child.deadline, now + self._stop_timeout_s)

    def _log_progress(self) -> None:
        self._progress_logger.log_progress(self.progress, has_failed=self.state is GenerationState.FAILED)


def hello_mismatch(hello: Hello, sha256: str) -> str:
    """Return why a child that said this must not load what has this digest, or ""."""
    worker_version = hello.versions.get("weightd", "unknown")
    if worker_version != VERSION:
        return (
            f"its interpreter has weightd {worker_version}, the daemon is {VERSION}: install the same version in both"
        )
    if hello.sha256 != sha256:
        return f"it would load a model of sha256 {hello.sha256:.12}, the snapshot has {sha256:.12}"
    return ""
