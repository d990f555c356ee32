"""Tests of the model registry: reloads with fake models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from weightd_daemon.config.batching import BatchingConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.tenants.tenant import DEFAULT_TENANT
from weightd_protocol.errors import Unavailable

ONE, TWO, THREE = (ModelConfig(path=f"/models/{number}.onnx") for number in (1, 2, 3))
DRAIN_REPLACED = f"drain {ONE.predict_timeout:g} replaced"


class FakeModel:
    """Fake model with switches for its state; records the calls of the registry."""

    def __init__(self, name: str, config: ModelConfig, numbers: IdSequence, predecessor: FakeModel | None) -> None:
        self.name = name
        self.config = config
        self.numbers = numbers
        self.dispatcher = SimpleNamespace(is_idle=True, queued_by_tenant={})
        self.successor: FakeModel | None = None
        self.note = ""
        self.is_updating = self.may_serve_soon = self.is_complete = self.has_failed = self.is_draining = (
            self.is_gone
        ) = False
        self.replaced = predecessor
        self.is_reinstated = False
        self.may_retry = False
        self.deaths = 0
        # The object stands for all parts of a ServedModel.
        self.deployments = self.readiness = self.versions = self.snapshots = self.loading = self
        self.is_unloaded = False
        self.owner, self.last_used_at = "", 0.0
        self.calls: list[str] = []

    def reconfigure(self, config: ModelConfig) -> bool:
        if config.has_same_load(self.config):
            self.config = config
        return self.config is config

    def start(self, now: float) -> None:
        self.calls.append("start")

    def start_unloaded(self) -> None:
        self.is_unloaded = True
        self.calls.append("start unloaded")

    def retry(self, now: float) -> None:
        self.calls.append("retry")

    def reinstate(self, now: float) -> None:
        self.is_reinstated = True

    def mark_leaving(self, name: str) -> None:
        self.calls.append("mark leaving")

    def drain(self, now: float, *, timeout_s: float = 0.0, is_replaced: bool = False) -> None:
        self.is_draining = True
        self.calls.append(f"drain {timeout_s:g}{' replaced' if is_replaced else ''}")

    def adopt_requests(self, old: FakeModel, now: float) -> None:
        assert old.is_draining == bool(old.dispatcher.queued_by_tenant), (
            "the old model would have rejected its queued requests"
        )
        self.calls.append(f"adopt {old.config.path}")

    def drop_all(self) -> None:
        self.calls.append("remove snapshots")

    def unready_reason(self, now: float) -> str:
        return "no such file"


class RegistryHarness:
    """Model registry, and all models that it has created."""

    def __init__(self, **configs: ModelConfig) -> None:
        self.models: list[FakeModel] = []
        self.registry = ModelRegistry(self.make)
        self.registry.start(configs, 0.0)
        for each in self.models:
            each.may_serve_soon = each.is_complete = True
            each.calls.clear()

    def make(self, name: str, config: ModelConfig, ids: IdSequence, *, predecessor: ServedModel | None) -> ServedModel:
        self.models.append(FakeModel(name, config, ids, cast("FakeModel | None", predecessor)))
        return cast(ServedModel, self.models[-1])

    def reload(self, **configs: ModelConfig) -> ConfigDiff:
        change = self.registry.compare(configs)
        self.registry.apply(change, configs, 0.0)
        return change

    def serving(self) -> list[tuple[str, ModelConfig]]:
        """Return the serving models with their configurations."""
        self.registry.reconcile(0.0)
        return [(name, model.config) for name, model in self.registry.models.items()]


def test_reload_keeps_unchanged_and_adds_new_models() -> None:
    harness = RegistryHarness(a=ONE)
    assert str(harness.reload(a=ONE)) == "no model changed"
    assert str(harness.reload(b=TWO, a=ONE)) == "added b"
    assert [each.calls for each in harness.models] == [[], ["start"]]
    assert harness.serving() == [("b", TWO), ("a", ONE)]


def test_reload_retries_failed_models() -> None:
    harness = RegistryHarness(a=ONE, b=TWO, c=THREE)
    harness.models[0].may_retry = harness.models[2].may_retry = True
    # A failed model with a changed configuration is replaced instead.
    change = harness.reload(a=ONE, b=TWO, c=ONE)
    assert (change, str(change)) == (ConfigDiff((), ("c",), (), ("a",)), "changed c; retried a")
    assert [each.calls for each in harness.models] == [["retry"], [], [], ["start"]]


def test_removed_model_finishes_requests_first() -> None:
    harness = RegistryHarness(a=ONE, b=TWO)
    b = harness.models[1]
    b.dispatcher.is_idle, b.deaths = False, 3
    assert harness.reload(a=ONE) == ConfigDiff((), (), ("b",))
    assert harness.serving() == [("a", ONE)]
    assert (b.calls, len(harness.registry.all_models())) == (["mark leaving"], 2)
    b.dispatcher.is_idle = True
    for _ in range(2):
        harness.registry.reconcile(0.0)
        assert b.calls == ["mark leaving", "drain 0"]
    b.is_gone = True
    harness.registry.reconcile(0.0)
    assert b.calls == ["mark leaving", "drain 0", "remove snapshots"]
    assert (len(harness.registry.all_models()), harness.registry.deaths, harness.registry.changing) == (1, 3, [])


def test_changed_model_takes_over_when_complete() -> None:
    harness = RegistryHarness(a=ONE)
    assert harness.reload(a=TWO) == ConfigDiff((), ("a",), ())
    old, new = harness.models
    assert (harness.serving(), new.calls, len(harness.registry.changing)) == ([("a", ONE)], ["start"], 1)
    assert (new.replaced, old.is_reinstated) == (old, False)
    new.is_complete = True
    for _ in range(2):
        assert harness.serving() == [("a", TWO)]
        assert (new.calls, old.calls) == (["start", "adopt /models/1.onnx"], [DRAIN_REPLACED])
    # A worker of the old model exits while it drains; the new model adopts its requests.
    old.dispatcher.queued_by_tenant = {DEFAULT_TENANT: 1}
    harness.registry.reconcile(0.0)
    assert new.calls[2:] == ["adopt /models/1.onnx"]
    old.is_gone = True
    harness.registry.reconcile(0.0)
    assert [each.config for each in harness.registry.all_models()] == [TWO]


def test_change_without_reload_applies_at_once() -> None:
    harness = RegistryHarness(a=ONE)
    assert harness.reload(a=TWO).changed == ("a",)
    batching_only = replace(ONE, batching=BatchingConfig(8, exact=False))
    # The change also discards the successor that is loading.
    assert harness.reload(a=batching_only).changed == ("a",)
    assert [each.calls for each in harness.models] == [[], ["start", "drain 0"]]
    assert harness.serving() == [("a", batching_only)]


def test_failed_change_keeps_old_model_with_note() -> None:
    harness = RegistryHarness(a=ONE)
    harness.reload(a=TWO)
    old, failed = harness.models
    failed.has_failed = True
    assert harness.serving() == [("a", ONE)]
    assert old.note == "the changed configuration is not in force: no such file"
    assert failed.calls == ["start", "drain 0"]
    assert (failed.replaced, old.is_reinstated) == (old, True)
    # The next reload tries the change again.
    assert harness.reload(a=TWO) == ConfigDiff((), ("a",), ())
    assert (old.note, len(harness.models)) == ("", 3)


def test_model_that_does_not_serve_is_replaced_at_once() -> None:
    harness = RegistryHarness(a=ONE)
    harness.models[0].may_serve_soon = False
    harness.reload(a=TWO)
    assert harness.serving() == [("a", TWO)]
    assert harness.models[1].calls == ["start", "adopt /models/1.onnx"]


def test_repeated_change_is_ignored_and_new_change_replaces_it() -> None:
    harness = RegistryHarness(a=ONE)
    harness.reload(a=TWO)
    assert harness.reload(a=TWO) == ConfigDiff((), (), ())
    assert harness.reload(a=THREE) == ConfigDiff((), ("a",), ())
    assert [each.is_draining for each in harness.models] == [False, True, False]
    assert harness.reload(a=ONE) == ConfigDiff((), ("a",), ())
    assert [each.is_draining for each in harness.models] == [False, True, True]
    assert (harness.serving(), harness.models[0].successor) == ([("a", ONE)], None)


def test_removed_model_discards_its_successor() -> None:
    harness = RegistryHarness(a=ONE)
    harness.models[0].dispatcher.is_idle = False
    harness.reload(a=TWO)
    harness.reload()
    assert (harness.models[1].is_draining, len(harness.registry.all_models())) == (True, 2)
    harness.reload(a=TWO)
    harness.registry.reconcile(0.0)
    assert (harness.models[0].calls, harness.models[2].calls) == (["mark leaving"], ["start"])


@pytest.mark.parametrize("configs", [{"a": TWO, "b": TWO}, {"b": TWO}])
def test_reload_is_rejected_during_update(configs: dict[str, ModelConfig]) -> None:
    harness = RegistryHarness(a=ONE)
    harness.models[0].is_updating = True
    with pytest.raises(Unavailable, match=r"^a is being updated: try again after the update$"):
        harness.reload(**configs)
    assert (harness.serving(), len(harness.models)) == ([("a", ONE)], 1)


def test_ids_are_never_reused_for_a_name() -> None:
    harness = RegistryHarness(a=ONE, b=ONE)
    harness.reload(b=ONE)
    harness.reload(a=TWO, b=ONE)
    a, b, next_a = harness.models
    assert next_a.numbers is a.numbers
    assert b.numbers is not a.numbers


def test_drain_reaches_all_models() -> None:
    harness = RegistryHarness(a=ONE, b=TWO, c=THREE)
    harness.reload(a=TWO, b=TWO)
    harness.registry.drain(0.0)
    assert [each.is_draining for each in harness.models] == [True] * 4
