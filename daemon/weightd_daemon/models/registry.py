"""The registry of served models, which applies another configuration without interrupting the service.

If the configuration of a model changes, a new model is loaded beside the old one and takes over once it serves. If the
new model cannot be loaded, the old one stays. If only the batching or splitting of requests changes, nothing is loaded.

If two rank groups do not fit on the same cards together, the old model is drained first, and its requests wait for the
new model. If the new model cannot be loaded, the old one is loaded again.

A model that the new configuration removes accepts no more requests and completes the accepted ones.
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
from weightd_protocol.errors import Unavailable

_log = logging.getLogger("weightd")


class MakeModel(Protocol):
    """A factory of models."""

    def __call__(
        self, name: str, config: ModelConfig, ids: IdSequence, *, predecessor: ServedModel | None
    ) -> ServedModel:
        """Return a model that has not started; `predecessor` is the model that it will replace."""
        raise NotImplementedError


class ConfigDiff(NamedTuple):
    """The names of the models that a new configuration adds, changes, removes or retries.

    Attributes:
        retried: the unchanged models that have failed; they are loaded again.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    retried: tuple[str, ...] = ()

    def __str__(self) -> str:
        texts = [f"{what} {', '.join(names)}" for what, names in zip(self._fields, self, strict=True) if names]
        return "; ".join(texts) or "no model changed"


class ModelRegistry:
    """All models of the daemon.

    Args:
        make_model: makes a model that has not started.

    Attributes:
        models: the models that accept requests, by name.
        is_closed: whether the daemon is shutting down and accepts no more requests.
        changing: the models that are being replaced by a successor, and the replaced or removed models that are
            shutting down. While the list is empty, `reconcile` does nothing.
    """

    def __init__(self, make_model: MakeModel) -> None:
        self.models: dict[str, ServedModel] = {}
        self.is_closed = False
        self.changing: list[ServedModel] = []
        self._make_model = make_model
        self._id_sequences: dict[str, IdSequence] = {}
        self._past_deaths = 0

    def on_used(self, name: str, now: float) -> None:
        """Record that requests to a model have run that the daemon has not received."""
        model = self.models.get(name)
        if model is not None:
            model.loading.last_used_at = now

    def close(self) -> None:
        """Accept no more requests."""
        self.is_closed = True

    def start(self, configs: Mapping[str, ModelConfig], now: float) -> None:
        """Load the first models."""
        for name, config in configs.items():
            self._start(name, config, now)

    def resume(self, records: Iterable[ModelRecord], configs: Mapping[str, ModelConfig], now: float) -> None:
        """Take over the models that the previous daemon has loaded, then apply the configuration `configs`."""
        for record in records:
            self._id_sequences[record.name] = IdSequence(record.last_ids)
            self.models[record.name] = self._make_named(record.name, record.config)
            self.models[record.name].resume(record, now)
        diff = self.compare(configs)
        if any(diff):
            _log.info("the configuration has changed since the previous daemon: %s", diff)
        self.apply(diff, configs, now)

    def records(self) -> list[ModelRecord]:
        """Return a record of each model that the next daemon can `resume`."""
        return [record for model in self.models.values() if (record := model.record()) is not None]

    def compare(self, configs: Mapping[str, ModelConfig]) -> ConfigDiff:
        """Return the difference between the present configuration of the models and `configs`.

        Raises:
            Unavailable: a model that would be changed or removed is being updated.
        """
        diff = ConfigDiff(
            tuple(name for name in configs if name not in self.models),
            tuple(name for name, config in configs.items() if name in self.models and self._is_changed(name, config)),
            tuple(name for name in self.models if name not in configs),
            tuple(
                name
                for name, config in configs.items()
                if name in self.models and not self._is_changed(name, config) and self.models[name].loading.may_retry
            ),
        )
        for name in (*diff.changed, *diff.removed):
            if self.models[name].is_updating:
                raise Unavailable(f"{name} is being updated: try again after the update")
        return diff

    def apply(self, diff: ConfigDiff, configs: Mapping[str, ModelConfig], now: float) -> None:
        """Begin to apply the configuration `configs`; `diff` is the result of `compare`."""
        for name in diff.removed:
            self._remove(name, now)
        for name in diff.added:
            self._start(name, configs[name], now)
        for name in diff.changed:
            self._replace(name, configs[name], now)
        for name in diff.retried:
            self.models[name].loading.retry(now)
        # Status reports list the models in the order of the configuration file.
        self.models = {name: self.models[name] for name in configs}

    def reconcile(self, now: float) -> None:
        """Let loaded successors take over; drain replaced and removed models, and delete ended models."""
        for model in list(self.changing):
            if model.successor is not None:
                self._take_over_if_ready(model, model.successor, now)
        for model in list(self.changing):
            if model.successor is None:
                self._remove_if_drained(model, now)

    def drain(self, now: float) -> None:
        """Shut down all models."""
        for model in self.all_models():
            model.drain(now)

    def hand_over(self, now: float) -> None:
        """Fail the pending requests of all models before this daemon ends; its child processes keep running."""
        for model in self.all_models():
            model.dispatcher.hand_over()

    def all_models(self) -> list[ServedModel]:
        """Return every model that still has processes or files, successors included."""
        return [*self.models.values(), *(each.successor or each for each in self.changing)]

    def loaded_models(self) -> list[ServedModel]:
        """Return every model that is loaded or loading, or whose load has failed, successors included."""
        return [each for each in self.all_models() if not each.loading.is_unloaded]

    @property
    def deaths(self) -> int:
        """The number of processes of all models that exited unexpectedly or had to be killed."""
        return self._past_deaths + sum(model.deployments.deaths for model in self.all_models())

    # --- private ------------------------------------------------------------------------------------------------

    def _is_changed(self, name: str, config: ModelConfig) -> bool:
        """Return whether `config` differs from the configuration of the model, or of its successor if one is loading.

        The comparison with the successor ensures that a repeated reload changes nothing.
        """
        model = self.models[name]
        return (model.successor or model).config != config

    def _make_named(self, name: str, config: ModelConfig, predecessor: ServedModel | None = None) -> ServedModel:
        ids = self._id_sequences.setdefault(name, IdSequence())
        return self._make_model(name, config, ids, predecessor=predecessor)

    def _start(self, name: str, config: ModelConfig, now: float) -> None:
        self.models[name] = self._make_named(name, config)
        _start_model(self.models[name], now)

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
                "%s: the changed configuration is in force; nothing had to be loaded", name, extra=subject_extra(name)
            )
        elif model.config != config and model.loading.is_unloaded and not config.loads_at_start:
            successor = self._make_named(name, config, model)
            _start_model(successor, now)
            self._take_over(model, successor, now)
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
        """Let the new model take over once it serves, or at once if the old one cannot serve.

        If the new model has failed, the new model is dropped and the old one stays.
        """
        name = old.name
        if new.readiness.is_complete or not old.readiness.may_serve_soon:
            self._take_over(old, new, now)
        elif new.readiness.has_failed:
            old.note = f"the changed configuration is not in force: {new.readiness.unready_reason(now)}"
            _log.error("%s: %s", name, old.note, extra=subject_extra(name))
            self._discard_successor(old, now)

    def _take_over(self, old: ServedModel, new: ServedModel, now: float) -> None:
        # Without a successor, a model in `changing` is treated as one that is shutting down.
        old.successor = None
        if old not in self.changing:
            self.changing.append(old)
        self.models[old.name] = new
        new.loading.owner, new.loading.last_used_at = old.loading.owner, old.loading.last_used_at
        new.adopt_requests(old, now)
        old.drain(now, timeout_s=old.config.predict_timeout, is_replaced=True)
        _log.info("%s: the changed configuration is in force", old.name, extra=subject_extra(old.name))

    def _remove_if_drained(self, model: ServedModel, now: float) -> None:
        replacement = self.models.get(model.name)
        if replacement is not None and model.is_draining:
            if model.dispatcher.queued_by_tenant:
                # A worker of the old model has exited, and its requests have returned to the old model's queue. The new
                # model takes them over.
                replacement.adopt_requests(model, now)
        elif model.dispatcher.is_idle and not model.is_draining:
            model.drain(now)
        if model.is_gone:
            snapshots = model.versions.snapshots
            snapshots.drop_all()
            self.changing.remove(model)
            self._past_deaths += model.deployments.deaths
            _log.info("%s: the old model has stopped", model.name, extra=subject_extra(model.name))


def _start_model(model: ServedModel, now: float) -> None:
    if model.config.loads_at_start:
        model.start(now)
    else:
        model.loading.start_unloaded()
