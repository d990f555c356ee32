"""How a deployment stands, and how far it has come: every legal change of that is listed, another one raises."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weightd.daemon.config.policies import Policy
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.plan import Source, Terms
from weightd.daemon.generations.progress import Outlook
from weightd.daemon.generations.states import Machine
from weightd.daemon.models.budget import Room


class Stage(enum.Enum):
    """What becomes of a generation that fails depends on it."""

    FIRST = "first"  # nothing has served yet: what cannot be loaded is FAILED
    KEEPING = "keeping"  # something has served: what is lost is loaded again and again
    UPDATING = "updating"  # something else is loaded beside it, to take over on all devices at once
    AWAY = "away"  # it has made room for another model of its name, and comes again if that cannot be loaded
    FAILED = "failed"  # nothing is loaded before a retry or an update
    REPAIRING = "repairing"  # an update is loaded where nothing has served
    STOPPING = "stopping"  # everything winds down


class StageEvent(enum.Enum):
    """What happens to a deployment."""

    SERVE = "serve"
    UPDATE = "update"
    SETTLE = "settle"
    MAKE_WAY = "make way"
    COME_AGAIN = "come again"
    FAIL = "fail"
    RETRY = "retry"
    STOP = "stop"


LOADS = frozenset({Stage.FIRST, Stage.KEEPING, Stage.UPDATING, Stage.REPAIRING})

STAGE: Mapping[tuple[Stage, StageEvent], Stage] = {
    (Stage.FIRST, StageEvent.SERVE): Stage.KEEPING,
    (Stage.FIRST, StageEvent.FAIL): Stage.FAILED,
    (Stage.KEEPING, StageEvent.UPDATE): Stage.UPDATING,
    (Stage.FAILED, StageEvent.RETRY): Stage.FIRST,
    (Stage.FAILED, StageEvent.UPDATE): Stage.REPAIRING,
    (Stage.REPAIRING, StageEvent.SETTLE): Stage.KEEPING,
    (Stage.REPAIRING, StageEvent.FAIL): Stage.FAILED,
    (Stage.UPDATING, StageEvent.SETTLE): Stage.KEEPING,
    (Stage.KEEPING, StageEvent.MAKE_WAY): Stage.AWAY,
    (Stage.AWAY, StageEvent.COME_AGAIN): Stage.KEEPING,
    (Stage.AWAY, StageEvent.STOP): Stage.STOPPING,
    **{(stage, StageEvent.STOP): Stage.STOPPING for stage in Stage if stage in LOADS},
}


class Predecessor(NamedTuple):
    """The deployment of another model of the name, in whose place this one may come.

    Attributes:
        labels: returns those of its generations.
        make_way: has it leave, so that its room is free.
    """

    labels: Callable[[], list[str]]
    make_way: Callable[[float], object]


@dataclass(frozen=True)
class Succession:
    """What is configured of how one generation follows another.

    Attributes:
        policy: how one is replaced.
        fall_back: whether a generation that cannot share its weights is followed by one that does not.
        process_bytes: what each process takes on the device beside the weights; what was seen counts if it is more.
        buffer_bytes: what communication between ranks takes of each card.
    """

    policy: Policy
    fall_back: bool = False
    process_bytes: int = 0
    buffer_bytes: int = 0


class Deployed:
    """What there is of one model on one device, and what can be asked of it. Nothing here changes anything.

    Args:
        device: where.
        terms: of each generation.

    Attributes:
        serving: whose workers take requests; None while there is none.
        coming: the one that loads.
        leaving: those that wind down.
        terms: of the next generation.
        predecessor: whose place it may take where there is no room for both; None: nobody's.
    """

    def __init__(self, device: Room, terms: Terms) -> None:
        self.device = device
        self.terms = terms
        self.serving: Life | None = None
        self.coming: Life | None = None
        self.leaving: list[Life] = []
        # The one that tells why there is none, or no better one.
        self._blamed: Life | None = None
        self._last: Life | None = None
        self._is_unserved = False
        # What the next generation loads, once there may be one.
        self._wanted: Source | None = None
        self._machine = Machine(STAGE, Stage.FIRST, f"a deployment on {device.name}", {})
        self.predecessor: Predecessor | None = None

    @property
    def _stage(self) -> Stage:
        return self._machine.state

    @property
    def generations(self) -> list[Life]:
        """Every generation of which something is left, the one that serves first."""
        return [each for each in (self.serving, self.coming, *self.leaving) if each is not None]

    @property
    def cause(self) -> str:
        """Why there is no generation, or no better one; more of it may be known once its processes are gone."""
        return self._blamed.cause if self._blamed is not None else ""

    @property
    def may_recover(self) -> bool:
        """Whether what ended the last generation may not end the next one: a kill, or that everything ends."""
        return self._blamed is None or self._blamed.outlook is Outlook.BETTER or self._stage is Stage.STOPPING

    @property
    def main(self) -> Life:
        """The generation that tells how it stands."""
        generation = self.serving or self.coming or self._last
        if generation is None:
            raise RuntimeError("asked before the start")
        return generation

    @property
    def complete(self) -> bool:
        """Whether what `update` has loaded can take over."""
        return self.updating and self.coming is not None and self.coming.complete and self.coming.full

    @property
    def updating(self) -> bool:
        """Whether what `update` has loaded is still on its way."""
        return self._stage in (Stage.UPDATING, Stage.REPAIRING)

    @property
    def failed(self) -> bool:
        """Whether nothing has served and nothing is loaded, until a retry or an update."""
        return self._stage is Stage.FAILED

    @property
    def is_unserved(self) -> bool:
        """Whether it has `failed`, and no attempt since has succeeded."""
        return self._is_unserved

    @property
    def transient(self) -> bool:
        """Whether it has failed of a cause that may go away by itself."""
        return self.failed and self._blamed is not None and self._blamed.transient

    @property
    def is_lost(self) -> bool:
        """Whether nothing of what has served is left: it is being loaded again, or will be, and that may be in vain."""
        awaits = self.coming is not None and self.coming.awaits
        return self._stage is Stage.KEEPING and self.serving is None and not awaits

    @property
    def renews(self) -> bool:
        """Whether what serves has lost workers that only the next generation replaces, which is or will be loaded."""
        return self._stage is Stage.KEEPING and self.serving is not None and self.serving.needs_renewal

    @property
    def is_away(self) -> bool:
        """Whether it has made room for another model of its name."""
        return self._stage is Stage.AWAY

    @property
    def busy(self) -> bool:
        """Whether a generation loads, or has to, or may have to again."""
        return self.coming is not None or self._wanted is not None or self.is_away
