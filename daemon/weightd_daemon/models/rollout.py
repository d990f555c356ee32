"""Updates of a model and their rollback: start, takeover or failure, and the reply to the client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weightd_common.safe_open import Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RANK_PLACEHOLDER
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.versions import ModelVersions
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_protocol.errors import FailedPrecondition, InvalidArgument, RequestError, Unavailable
from weightd_protocol.messages.control import UpdateResponse


class UpdateSink(Protocol):
    """Sends the results of updates to the clients that requested them."""

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Report to the client that the updated model serves."""

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Report to the client that the update has failed."""


class _Rollout(NamedTuple):
    """An update in progress, and the client that waits for its result."""

    client: bytes
    request_id: str
    source: ModelSource


class Rollouts:
    """The updates of one model, one at a time. A new version takes over on all devices or on none.

    Args:
        name: the name of the model.
        config: the configuration of the model.
        deployments: the deployments of the model, one for each device or rank group.
        versions: the current and the previous source of the model.
        dispatcher: the dispatcher of the model's requests.
        update_sink: sends the result of an update to the client.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        deployments: Sequence[Deployment],
        versions: ModelVersions,
        dispatcher: Dispatcher,
        update_sink: UpdateSink,
    ) -> None:
        self._name = name
        self._config = config
        self._deployments = deployments
        self._versions = versions
        self._dispatcher = dispatcher
        self._update_sink = update_sink
        self._current: _Rollout | None = None

    @property
    def is_in_progress(self) -> bool:
        """Whether an update is in progress."""
        return self._current is not None

    def check_alone(self) -> None:
        """Reject an update if the model shares its process, because the update would replace all models of the group.

        Raises:
            FailedPrecondition: the model belongs to a group.
        """
        group = self._config.group
        if group is not None:
            other_models = ", ".join(each for each in group.models if each != self._name)
            raise FailedPrecondition(
                f"{self._name} shares its processes with {other_models} (group {group.name}) and cannot be "
                "updated alone; change the configuration and reload"
            )

    def start(  # noqa: PLR0913
        self, client: bytes, request_id: str, now: float, *, path: str, weights: str, rollback: bool, grant: Grant
    ) -> None:
        """Start an update; `ServedModel.update` describes the arguments.

        Raises:
            RequestError: the update is rejected; nothing has changed.
        """
        if self._current is not None:
            raise Unavailable(f"{self._name} is already being updated")
        for each in self._deployments:
            if not (each.has_failed or each.is_lost or each.is_being_replaced) and (
                each.serving is None or each.is_busy
            ):
                raise Unavailable(f"{self._name} is loading on {each.placement.name}: try again once the model serves")
        if rollback:
            source = self._rollback_target()
        else:
            self._check_file(path)
            source = self._versions.create(path, weights, grant)
        self._current = _Rollout(client, request_id, source)
        for deployment in self._deployments:
            deployment.update(source, now)

    def reconcile(self, now: float) -> bool:
        """Complete the update if all devices can take over or one has failed; return whether an update has ended."""
        rollout = self._current
        if rollout is None:
            return False
        failed_deployment = next((each for each in self._deployments if not each.is_updating), None)
        if failed_deployment is not None:
            self._current = None
            self._abort(rollout, failed_deployment, now)
        elif all(each.is_update_ready for each in self._deployments):
            self._current = None
            self._take_over(rollout, now)
        return self._current is None

    # --- private ------------------------------------------------------------------------------------------------

    def _abort(self, rollout: _Rollout, failed_deployment: Deployment, now: float) -> None:
        cause = failed_deployment.cause or "weightd is stopping"
        for deployment in self._deployments:
            deployment.abandon(f"update abandoned: {cause}", now)
        self._versions.drop(rollout.source)
        error_type = Unavailable if failed_deployment.may_recover else FailedPrecondition
        self._update_sink.reply_failed(rollout.client, rollout.request_id, error_type(f"not updated: {cause}"))

    def _take_over(self, rollout: _Rollout, now: float) -> None:
        for deployment in self._deployments:
            deployment.take_over(now)
        self._versions.on_take_over(rollout.source)
        self._dispatcher.on_model_replaced(self._deployments[0].main_generation.built)
        generation_numbers = tuple(each.main_generation.number for each in self._deployments)
        current = self._versions.current
        self._update_sink.reply_updated(
            rollout.client,
            UpdateResponse(
                rollout.request_id,
                self._name,
                generation_numbers,
                current.path,
                current.weights,
                configured_path=self._config.path,
            ),
        )

    def _rollback_target(self) -> ModelSource:
        """Return the source from before the last update.

        A second rollback in a row is rejected, because it would return to the version that the first rollback has
        replaced.

        Raises:
            FailedPrecondition: no earlier source is kept.
        """
        versions = self._versions
        if versions.previous is not None:
            return versions.previous
        if versions.rolled_back is not None:
            went = f"from {versions.rolled_back} to {versions.current}"
            raise FailedPrecondition(
                f"{self._name} was already rolled back {went}: update the model to use a newer version"
            )
        raise FailedPrecondition(
            f"no version to roll back to: {self._name} serves {versions.current}, and no earlier version is kept"
        )

    def _check_file(self, path: str) -> None:
        """Check that a model file's path has the engine's suffix and, for a rank group, a placeholder for the rank.

        The suffix determines which other files belong to a model, so the engine must not get a file with another
        suffix.

        Raises:
            InvalidArgument: the path is not valid for the model.
        """
        suffix = self._config.engine_spec.suffix
        if path and Path(path).suffix != suffix:
            raise InvalidArgument(f"expected a {suffix} file for engine {self._config.engine}, got {path!r}")
        if path and self._config.ranks is not None and RANK_PLACEHOLDER not in path:
            raise InvalidArgument(
                f"expected {RANK_PLACEHOLDER} in the path, because each rank has a separate file, got {path!r}"
            )
