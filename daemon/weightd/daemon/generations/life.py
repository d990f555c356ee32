"""What every generation can be told, whatever its processes are: a holder and its workers, or a unit."""

from __future__ import annotations

import abc

from weightd.daemon.generations.actions import Pin
from weightd.daemon.generations.plan import Canary
from weightd.daemon.generations.progress import Cause, Standing
from weightd.daemon.generations.states import ChildState, GenerationEvent, GenerationState
from weightd.daemon.host.ends import End
from weightd.protocol.messages.children import Broken, Hello
from weightd.protocol.version import VERSION

# An interpreter on a loaded machine needs seconds to import an engine. What comes before HELLO beside that, CANN's
# import and the digest of the model, may take as long as a build.
HELLO_TIMEOUT_S = 60.0

# A child that was told to stop only has to answer what it is computing.
STOP_TIMEOUT_S = 10.0


class Life(Standing, abc.ABC):
    """The life of a generation: events and the clock go in, `Action`s come out. How it stands is that of `Standing`."""

    _stop_timeout = STOP_TIMEOUT_S

    def start(self) -> None:
        """Begin."""
        self._actions.append(Pin())
        self._tell_progress()

    def resumed(self) -> None:
        """It was made of what an earlier daemon has written down; it serves once its processes are `back`."""
        self._machine.advance(GenerationEvent.RESUME)

    @abc.abstractmethod
    def pinned(self, sha256: str, now: float, canary: Canary | None = None, digests: tuple[str, ...] = ()) -> None:
        """The snapshot exists: start the processes.

        Args:
            sha256: of the model.
            now: the clock.
            canary: what an earlier generation has found out of it.
            digests: of what each rank loads, where the model is cut.
        """

    def failed(self, cause: str, now: float, *, transient: bool = False) -> None:
        """It cannot go on, for `cause`: everything that runs is wound down."""
        self._fail(Cause(cause, transient=transient), now)

    def given_up(self, what: str, now: float) -> None:
        """Its cause has led to this: everything that runs is wound down."""
        self._fail(self._cause.led_to(f"{what}: "), now)

    @abc.abstractmethod
    def hello(self, name: str, hello: Hello, now: float) -> None:
        """A child is up."""

    @abc.abstractmethod
    def back(self, name: str, now: float, step: int = 0) -> None:
        """A child that was READY for the daemon before this one is connected; `step` is the last one it has run."""

    @abc.abstractmethod
    def broken(self, name: str, broken: Broken, now: float) -> None:
        """A child says that it cannot do what it is for."""

    @abc.abstractmethod
    def leaving(self, name: str, now: float, why: str = "") -> None:
        """A child's model may be spoilt, for a predict has failed for this reason: it must go."""

    @abc.abstractmethod
    def hung(self, name: str, why: str, now: float, *, useful: bool = False) -> None:
        """A child does not answer any more. `useful`: it had answered something."""

    @abc.abstractmethod
    def exited(self, name: str, end: End, now: float, *, useful: bool = False) -> None:
        """A child has exited and has been waited for. `useful`: it had answered some request."""

    @abc.abstractmethod
    def drain(self, now: float, *, patience: float = 0.0) -> None:
        """No new work: wind down; to finish what they have, its processes may take `patience` seconds more."""

    @abc.abstractmethod
    def tick(self, now: float) -> None:
        """Time has passed."""

    @abc.abstractmethod
    def _fail(self, cause: Cause, now: float) -> None:
        """It cannot go on."""

    def _bound_stops(self, now: float, patience: float) -> None:
        """Who was told to leave, and who will be, may take as long, and no one longer than he was given."""
        self._stop_timeout = STOP_TIMEOUT_S + patience
        for child in self.children.values():
            if child.state is ChildState.STOPPING:
                child.deadline = min(child.deadline, now + self._stop_timeout)

    def _tell_progress(self) -> None:
        self._teller.progress(self.progress, has_failed=self.state is GenerationState.FAILED)


def misfit(hello: Hello, sha256: str) -> str:
    """Return why a child that said this must not load what has this digest, or ""."""
    theirs = hello.versions.get("weightd", "unknown")
    if theirs != VERSION:
        return f"its interpreter has weightd {theirs}, the daemon is {VERSION}: install the same version in both"
    if hello.sha256 != sha256:
        return f"it would load a model of sha256 {hello.sha256:.12}, pinned is {sha256:.12}"
    return ""
