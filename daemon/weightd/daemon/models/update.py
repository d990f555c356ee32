"""An update of a model, or the way back from one: who has asked for it, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.ranks import RANK_PLACEHOLDER
from weightd.daemon.generations.plan import Source
from weightd.daemon.models.deployment import Deployment
from weightd.daemon.models.sources import Sources
from weightd.daemon.requests.desk import Desk
from weightd.protocol.errors import FailedPrecondition, InvalidArgument, RequestError, Unavailable
from weightd.protocol.messages.control import UpdateResponse
from weightd.shared.reach import Grant


class Operators(Protocol):
    """What those have to be told who have asked for an update."""

    def tell_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Tell the client that an update has taken over."""

    def tell_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Tell the client that the update has failed."""


class _Update(NamedTuple):
    """An update under way, and who waits for its end."""

    client: bytes
    request_id: str
    source: Source


class Updates:
    """The updates of one model, of which one is under way at a time. All devices take over together, or none.

    Args:
        name: of the model.
        config: of the model.
        deployments: one for each device.
        sources: of the model.
        desk: where its requests are.
        operators: are told.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        deployments: Sequence[Deployment],
        sources: Sources,
        desk: Desk,
        operators: Operators,
    ) -> None:
        self._name = name
        self._config = config
        self._deployments = deployments
        self._sources = sources
        self._desk = desk
        self._operators = operators
        self._update: _Update | None = None

    @property
    def under_way(self) -> bool:
        """Whether there is one."""
        return self._update is not None

    def begin(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Load what is at `path` beside what serves, as `Model.update` says.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        if self._update is not None:
            raise Unavailable(f"{self._name} is being updated already")
        for each in self._deployments:
            if not (each.failed or each.is_lost or each.renews) and (each.serving is None or each.busy):
                raise Unavailable(f"{self._name} is loading on {each.device.name}: try again once it serves")
        if rollback:
            source = self._previous()
        else:
            self._check_file(path)
            source = self._sources.new(path, weights, grant)
        self._update = _Update(client, request_id, source)
        for deployment in self._deployments:
            deployment.update(source, now)

    def settle(self, now: float) -> bool:
        """See whether what is under way can take over, or has failed; return whether it has ended."""
        update = self._update
        if update is None:
            return False
        failed = next((each for each in self._deployments if not each.updating), None)
        if failed is not None:
            self._update = None
            self._give_up(update, failed, now)
        elif all(each.complete for each in self._deployments):
            self._update = None
            self._take_over(update, now)
        return self._update is None

    # --- within -------------------------------------------------------------------------------------------------

    def _give_up(self, update: _Update, failed: Deployment, now: float) -> None:
        cause = failed.cause or "weightd is stopping"
        for deployment in self._deployments:
            deployment.abandon(f"given up: {cause}", now)
        self._sources.drop(update.source)
        error = Unavailable if failed.may_recover else FailedPrecondition
        self._operators.tell_failed(update.client, update.request_id, error(f"not updated: {cause}"))

    def _take_over(self, update: _Update, now: float) -> None:
        for deployment in self._deployments:
            deployment.switch(now)
        self._sources.took_over(update.source)
        self._desk.renew(self._deployments[0].main.built)
        numbers = tuple(each.main.number for each in self._deployments)
        serves = self._sources.current
        self._operators.tell_updated(
            update.client,
            UpdateResponse(
                update.request_id, self._name, numbers, serves.path, serves.weights, configured=self._config.path
            ),
        )

    def _previous(self) -> Source:
        """What a rollback goes back to: once. A second one would bring back what was found wanting."""
        there = self._sources
        if there.previous is not None:
            return there.previous
        if there.undone is not None:
            went = f"from {there.undone} to {there.current}"
            raise FailedPrecondition(f"{self._name} was rolled back already, {went}: update it to go forth again")
        raise FailedPrecondition(
            f"there is nothing to go back to: {self._name} serves {there.current}, and nothing before it is kept"
        )

    def _check_file(self, path: str) -> None:
        """By the suffix it is known which other files belong to a model: no other reader may find more."""
        suffix = self._config.engine_spec.suffix
        if path and Path(path).suffix != suffix:
            raise InvalidArgument(f"expected a {suffix} file for engine {self._config.engine}, got {path!r}")
        if path and self._config.ranks is not None and RANK_PLACEHOLDER not in path:
            raise InvalidArgument(f"expected {RANK_PLACEHOLDER} in the path, for each rank has a file of its own, got {path!r}")
