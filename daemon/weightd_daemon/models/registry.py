"""The models that are served, and how another configuration becomes true without an interruption.

A model whose configuration changes is loaded anew beside the one that serves, and takes over once it serves; if it
cannot, everything stays as it was. Two groups of ranks may have no room beside each other: then the old one makes way,
requests wait, and it comes again if the new one cannot be loaded. Nothing is loaded where only other requests go
together, or are cut. A model that is removed takes no further request, and finishes what it has accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from weightd_daemon.config.model import ModelConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.log_setup import subject_extra
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import NotFound, Unavailable

_log = logging.getLogger("weightd")


class MakeModel(Protocol):
    """Makes models that have not started."""

    def __call__(
        self, name: str, config: ModelConfig, ids: IdSequence, *, predecessor: ServedModel | None
    ) -> ServedModel:
        """Return a model; `predecessor` is the one that it is to replace."""
        raise NotImplementedError


class ConfigDiff(NamedTuple):
    """What a new configuration changes: the names of models.

    Attributes:
        retried: those that have failed, and are loaded again as they are.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    retried: tuple[str, ...] = ()

    def __str__(self) -> str:
        texts = [f"{what} {', '.join(names)}" for what, names in zip(self._fields, self, strict=True) if names]
        return "; ".join(texts) or "no model changes"


class ModelRegistry:
    """Every model there is.

    Args:
        make_model: makes a model that has not started.

    Attributes:
        models: those that take requests, by name.
        is_closed: whether no request is accepted any more, as the daemon stops.
        changing: those that are to be replaced by their successor once it has loaded, and those that leave: while
            there are none, `reconcile` has nothing to see.
    """

    def __init__(self, make_model: MakeModel) -> None:
        self.models: dict[str, ServedModel] = {}
        self.is_closed = False
        self.changing: list[ServedModel] = []
        self._make_model = make_model
        self._id_sequences: dict[str, IdSequence] = {}
        self._past_deaths = 0

    # --- for clients --------------------------------------------------------------------------------------------

    def find(self, name: str, viewer: Tenant) -> ServedModel:
        """Return a model that exists for this tenant.

        Raises:
            NotFound: there is none; the text is the same as for a name that exists for nobody.
        """
        model = self.models.get(name)
        if model is None or not viewer.can_see(name):
            raise self.not_found(name, viewer)
        return model

    def not_found(self, name: str, viewer: Tenant) -> NotFound:
        """Return the error of a name that is no model's, or none of a model that exists for this tenant."""
        return NotFound(f"no model {name!r}; there are: {', '.join(self.visible_models(viewer)) or 'none'}")

    def is_visible(self, name: str, viewer: Tenant) -> bool:
        """Return whether there is such a model for this tenant."""
        return name in self.models and viewer.can_see(name)

    def visible_models(self, viewer: Tenant) -> Mapping[str, ServedModel]:
        """Return the models that exist for this tenant."""
        return {name: model for name, model in self.models.items() if viewer.can_see(name)}

    # --- for the daemon -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Accept no request any more."""
        self.is_closed = True

    def start(self, configs: Mapping[str, ModelConfig], now: float) -> None:
        """Load the first models."""
        for name, config in configs.items():
            self._start(name, config, now)

    def resume(self, records: Iterable[ModelRecord], configs: Mapping[str, ModelConfig], now: float) -> None:
        """Go on with the models that a daemon before this one has loaded, and begin to make `configs` true."""
        for record in records:
            self._id_sequences[record.name] = IdSequence(record.last_ids)
            self.models[record.name] = self._make_named(record.name, record.config)
            self.models[record.name].resume(record, now)
        diff = self.compare(configs)
        if any(diff):
            _log.info("the configuration has changed since: %s", diff)
        self.apply(diff, configs, now)

    def records(self) -> list[ModelRecord]:
        """Return what the next daemon has to know to `resume` them."""
        return [record for model in self.models.values() if (record := model.record()) is not None]

    def compare(self, configs: Mapping[str, ModelConfig]) -> ConfigDiff:
        """Return what `configs` would change.

        Raises:
            Unavailable: a change of a model that it concerns is under way.
        """
        diff = ConfigDiff(
            tuple(name for name in configs if name not in self.models),
            tuple(name for name, config in configs.items() if name in self.models and self._is_changed(name, config)),
            tuple(name for name in self.models if name not in configs),
            tuple(
                name
                for name, config in configs.items()
                if name in self.models and not self._is_changed(name, config) and self.models[name].may_retry
            ),
        )
        for name in (*diff.changed, *diff.removed):
            if self.models[name].is_updating:
                raise Unavailable(f"{name} is being updated: try again once that is over")
        return diff

    def apply(self, diff: ConfigDiff, configs: Mapping[str, ModelConfig], now: float) -> None:
        """Begin to make `configs` true, of which `diff` is the comparison."""
        for name in diff.removed:
            self._remove(name, now)
        for name in diff.added:
            self._start(name, configs[name], now)
        for name in diff.changed:
            self._replace(name, configs[name], now)
        for name in diff.retried:
            self.models[name].retry(now)
        # In the order of the file, which is that of the status.
        self.models = {name: self.models[name] for name in configs}

    def reconcile(self, now: float) -> None:
        """Something has happened: see what takes over by now, and what is gone."""
        for model in list(self.changing):
            if model.successor is not None:
                self._take_over_if_ready(model, model.successor, now)
        for model in list(self.changing):
            if model.successor is None:
                self._remove_if_drained(model, now)

    def drain(self, now: float) -> None:
        """Wind everything down."""
        for model in self.all_models():
            model.drain(now)

    def hand_over(self, now: float) -> None:
        """This daemon ends, and its children go on: nobody waits for an answer any more."""
        for model in self.all_models():
            model.dispatcher.hand_over()

    def all_models(self) -> list[ServedModel]:
        """Return every model of which something is left."""
        return [*self.models.values(), *(each.successor or each for each in self.changing)]

    @property
    def deaths(self) -> int:
        """Processes that ended, or had to be ended, without being asked to."""
        return self._past_deaths + sum(model.deployments.deaths for model in self.all_models())

    # --- within -------------------------------------------------------------------------------------------------

    def _is_changed(self, name: str, config: ModelConfig) -> bool:
        """What loads for the name counts, if something does: asking twice for the same is asking once."""
        model = self.models[name]
        return (model.successor or model).config != config

    def _make_named(self, name: str, config: ModelConfig, predecessor: ServedModel | None = None) -> ServedModel:
        ids = self._id_sequences.setdefault(name, IdSequence())
        return self._make_model(name, config, ids, predecessor=predecessor)

    def _start(self, name: str, config: ModelConfig, now: float) -> None:
        self.models[name] = self._make_named(name, config)
        self.models[name].start(now)

    def _remove(self, name: str, now: float) -> None:
        model = self.models.pop(name)
        self._discard_successor(model, now)
        model.deployments.mark_leaving(name)
        self.changing.append(model)

    def _replace(self, name: str, config: ModelConfig, now: float) -> None:
        model = self.models[name]
        self._discard_successor(model, now)
        model.note = ""
        if model.config != config and model.reconfigure(config):
            _log.info(
                "%s: the changed configuration is in force, nothing had to be loaded", name, extra=subject_extra(name)
            )
        elif model.config != config:
            self.changing.append(model)
            model.successor = self._make_named(name, config, model)
            model.successor.start(now)

    def _discard_successor(self, model: ServedModel, now: float) -> None:
        if model.successor is not None:
            model.successor.drain(now)
            self.changing.remove(model)
            self.changing.append(model.successor)
            model.successor = None
            model.deployments.reinstate(now)

    def _take_over_if_ready(self, old: ServedModel, new: ServedModel, now: float) -> None:
        """Let the new model take over once it serves, or at once where the old one does not."""
        name = old.name
        if new.readiness.is_complete or not old.readiness.may_serve_soon:
            # It leaves from now on.
            old.successor = None
            self.models[name] = new
            new.adopt_requests(old, now)
            old.drain(now, timeout_s=old.config.predict_timeout, is_replaced=True)
            _log.info("%s: the changed configuration is in force", name, extra=subject_extra(name))
        elif new.readiness.has_failed:
            old.note = f"the changed configuration is not in force: {new.readiness.unready_reason(now)}"
            _log.error("%s: %s", name, old.note, extra=subject_extra(name))
            self._discard_successor(old, now)

    def _remove_if_drained(self, model: ServedModel, now: float) -> None:
        replacement = self.models.get(model.name)
        if replacement is not None and model.is_draining:
            if model.dispatcher.queued_by_tenant:
                # What a worker had that died while it left.
                replacement.adopt_requests(model, now)
        elif model.dispatcher.is_idle and not model.is_draining:
            model.drain(now)
        if model.is_gone:
            snapshots = model.versions.snapshots
            snapshots.drop_all()
            self.changing.remove(model)
            self._past_deaths += model.deployments.deaths
            _log.info("%s: a model that is served no more has left", model.name, extra=subject_extra(model.name))
