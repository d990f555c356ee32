"""The lookup of the model that a client names: its visibility to the client's tenant, and the choice of a version."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from weightd_daemon.api.version_sets import ProvenVersions, VersionReadiness, VersionSet
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import RolloutRecord, ShareRecord
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.log_setup import subject_extra
from weightd_daemon.scheduling.request import with_model_name
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import FailedPrecondition, NotFound
from weightd_protocol.messages.control import ABORT, PROMOTE, Rollout
from weightd_protocol.messages.inference import RequestDescription
from weightd_protocol.messages.status import VersionSetStatus, VersionShare
from weightd_protocol.model_names import ONLY_VERSION, join_version, split_version

_log = logging.getLogger("weightd")


class ModelLookup:
    """Finds the models that clients name.

    A model with several versions is a set of models NAME@VERSION. A client that names no version gets one of them.

    Args:
        registry: the models.

    Attributes:
        registry: the models.
        proven: knows which versions were loaded.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.registry = registry
        self.proven = ProvenVersions(lambda: self.registry.models)
        self._version_sets: dict[str, VersionSet] = {}

    # --- for clients --------------------------------------------------------------------------------------------

    def find(self, name: str, viewer: Tenant) -> ServedModel:
        """Return the model with this name, or the version that answers its requests, if the tenant may see the model.

        Raises:
            NotFound: the tenant can see no model of this name. The error does not reveal whether another tenant can.
        """
        resolved = self.resolve(name)
        model = self.registry.models.get(resolved)
        if model is None or not viewer.can_see(resolved):
            raise self._not_found(name, viewer)
        return model

    def find_for_request(
        self, description: RequestDescription, request_id: str, tenant: Tenant
    ) -> tuple[ServedModel, RequestDescription]:
        """Return the model that answers an inference request, and the request's description with this model's name.

        Raises:
            NotFound: see `find`.
        """
        name = description.model_name
        resolved = self.resolve(name, request_id)
        model = self.registry.models.get(resolved)
        if model is None or not tenant.can_see(resolved):
            raise self._not_found(name, tenant)
        return model, description if resolved is name else with_model_name(description, resolved)

    def resolve(self, name: str, request_id: str = "") -> str:
        """Return the name of the model that answers a request to `name`; `name` itself if there is no such model.

        For a model with several versions, the result is the name of one version. NAME@1 is another name of a model
        without versions.

        Args:
            name: the name in the request.
            request_id: the id of the request; it decides which version answers if several versions share the requests.
        """
        if name in self.registry.models:
            return name
        if name in self._version_sets:
            return join_version(name, str(self._choose(name, request_id)))
        model, version_text = split_version(name)
        return model if version_text == ONLY_VERSION else name

    def is_visible(self, name: str, viewer: Tenant) -> bool:
        """Return whether this tenant may see a model of that name."""
        resolved = self.resolve(name)
        return resolved in self.registry.models and viewer.can_see(resolved)

    def visible_models(self, viewer: Tenant) -> Mapping[str, ServedModel]:
        """Return the models that this tenant may see."""
        return {name: model for name, model in self.registry.models.items() if viewer.can_see(name)}

    def visible_names(self, viewer: Tenant) -> list[str]:
        """Return the names of the models that this tenant may see, including models with several versions."""
        sets = [name for name in self._version_sets if viewer.can_see(name)]
        return [*self.visible_models(viewer), *sets]

    def _not_found(self, name: str, viewer: Tenant) -> NotFound:
        model, version = split_version(name)
        is_model = model in self.registry.models or model in self._version_sets
        if version and is_model and viewer.can_see(model):
            versions = self._version_sets[model].config.versions if model in self._version_sets else (ONLY_VERSION,)
            return NotFound(f"no version {version!r} of model {model!r}; there are: {', '.join(map(str, versions))}")
        return NotFound(f"no model {name!r}; there are: {', '.join(self.visible_names(viewer)) or 'none'}")

    def _readiness_of(self, name: str) -> VersionReadiness:
        model = self.registry.models.get(name)
        if model is None or model.readiness.has_failed:
            return VersionReadiness.UNAVAILABLE
        if model.readiness.may_serve_soon:
            return VersionReadiness.SERVING
        if model.loading.unavailable is not None and not model.config.is_on_demand:
            return VersionReadiness.UNAVAILABLE
        return VersionReadiness.LOADABLE if self.proven.was_loaded(model) else VersionReadiness.UNPROVEN

    # --- versions -----------------------------------------------------------------------------------------------

    def configure(self, configs: Mapping[str, VersionSetConfig], rollouts: Iterable[RolloutRecord] = ()) -> None:
        """Apply the configured versions; `rollouts` are the rollouts that the previous daemon has handed over."""
        previous, self._version_sets = self._version_sets, {}
        for name, config in configs.items():
            version_set = self._version_sets[name] = previous.get(name) or VersionSet(name, config)
            version_set.configure(config)
        for record in rollouts:
            restored = self._version_sets.get(record.model)
            if restored is not None:
                restored.rollout = {each.version: each.share for each in record.shares}
                restored.configure(restored.config)

    def version_sets(self, viewer: Tenant | None) -> tuple[VersionSetStatus, ...]:
        """Return the status of the models with several versions that a tenant may see; for None, of all such models."""
        return tuple(
            VersionSetStatus(name, self.version_shares(name), bool(version_set.rollout))
            for name, version_set in self._version_sets.items()
            if viewer is None or viewer.can_see(name)
        )

    def version_shares(self, name: str) -> tuple[VersionShare, ...]:
        """Return each version of a model with its present percentage of the requests that name no version."""
        version_set = self._version_sets[name]
        shares = version_set.shares or {self._choose(name): 1.0}
        return tuple(VersionShare(each, 100 * shares.get(each, 0.0)) for each in version_set.config.versions)

    def roll_out(self, message: Rollout) -> None:
        """Change the shares of a model's versions.

        Raises:
            RequestError: the model has no such version, or its shares cannot be changed in this way.
        """
        name = message.model_name
        version_set = self._version_sets.get(name)
        if version_set is None:
            raise FailedPrecondition(f"{name} has no versions: its configuration has no key versions")
        if message.action == ABORT:
            version_set.abort()
        elif message.action == PROMOTE:
            version_set.promote(message.version)
        else:
            version_set.start_rollout(message.version, message.percent, self._choose(name))
        text = ", ".join(f"{each.percent:g} % to version {each.version}" for each in self.version_shares(name))
        _log.info("%s: requests without a version go %s", name, text, extra=subject_extra(name))

    def rollout_records(self) -> list[RolloutRecord]:
        """Return the rollouts in progress for the next daemon."""
        return [
            RolloutRecord(name, tuple(ShareRecord(*each) for each in version_set.rollout.items()))
            for name, version_set in self._version_sets.items()
            if version_set.rollout
        ]

    def _choose(self, name: str, request_id: str = "") -> int:
        """Return the version of a model that answers a request."""
        version_set = self._version_sets[name]
        return version_set.choose(request_id, lambda each: self._readiness_of(join_version(name, str(each))))
