"""What a reload does to models, which are a few switches here."""

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
LEAVES = f"drain {ONE.predict_timeout:g} replaced"


class FakeModel:
    """Serves, fails and is gone when a test says so, and keeps a record of what it is told."""

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
        # The parts of a ServedModel.
        self.deployments = self.readiness = self.versions = self.snapshots = self
        self.done: list[str] = []

    def reconfigure(self, config: ModelConfig) -> bool:
        if config.has_same_load(self.config):
            self.config = config
        return self.config is config

    def start(self, now: float) -> None:
        self.done.append("start")

    def retry(self, now: float) -> None:
        self.done.append("retry")

    def reinstate(self, now: float) -> None:
        self.is_reinstated = True

    def mark_leaving(self, name: str) -> None:
        self.done.append("mark leaving")

    def drain(self, now: float, *, timeout_s: float = 0.0, is_replaced: bool = False) -> None:
        self.is_draining = True
        self.done.append(f"drain {timeout_s:g}{' replaced' if is_replaced else ''}")

    def adopt_requests(self, old: FakeModel, now: float) -> None:
        assert old.is_draining == bool(old.dispatcher.queued_by_tenant), "it would have refused what waits"
        self.done.append(f"adopt {old.config.path}")

    def drop_all(self) -> None:
        self.done.append("remove snapshots")

    def unready_reason(self, now: float) -> str:
        return "no such file"


class Yard:
    """A registry, and every model that it has made."""

    def __init__(self, **configs: ModelConfig) -> None:
        self.made: list[FakeModel] = []
        self.fleet = ModelRegistry(self.make)
        self.fleet.start(configs, 0.0)
        for each in self.made:
            each.may_serve_soon = each.is_complete = True
            each.done.clear()

    def make(self, name: str, config: ModelConfig, ids: IdSequence, *, predecessor: ServedModel | None) -> ServedModel:
        self.made.append(FakeModel(name, config, ids, cast("FakeModel | None", predecessor)))
        return cast(ServedModel, self.made[-1])

    def reload(self, **configs: ModelConfig) -> ConfigDiff:
        change = self.fleet.compare(configs)
        self.fleet.apply(change, configs, 0.0)
        return change

    def serving(self) -> list[tuple[str, ModelConfig]]:
        """Who serves by now, each with its configuration."""
        self.fleet.reconcile(0.0)
        return [(name, model.config) for name, model in self.fleet.models.items()]


def test_what_has_not_changed_is_not_touched_and_a_new_model_takes_requests_at_once() -> None:
    yard = Yard(a=ONE)
    assert str(yard.reload(a=ONE)) == "no model changed"
    assert str(yard.reload(b=TWO, a=ONE)) == "added b"
    assert [each.done for each in yard.made] == [[], ["start"]]
    assert yard.serving() == [("b", TWO), ("a", ONE)]


def test_a_model_that_has_failed_is_loaded_again_as_it_is() -> None:
    yard = Yard(a=ONE, b=TWO, c=THREE)
    yard.made[0].may_retry = yard.made[2].may_retry = True
    # One that is changed, too, is made anew.
    change = yard.reload(a=ONE, b=TWO, c=ONE)
    assert (change, str(change)) == (ConfigDiff((), ("c",), (), ("a",)), "changed c; retried a")
    assert [each.done for each in yard.made] == [["retry"], [], [], ["start"]]


def test_a_model_that_is_removed_finishes_what_it_has_and_leaves() -> None:
    yard = Yard(a=ONE, b=TWO)
    b = yard.made[1]
    b.dispatcher.is_idle, b.deaths = False, 3
    assert yard.reload(a=ONE) == ConfigDiff((), (), ("b",))
    assert yard.serving() == [("a", ONE)]
    assert (b.done, len(yard.fleet.all_models())) == (["mark leaving"], 2)
    b.dispatcher.is_idle = True
    for _ in range(2):
        yard.fleet.reconcile(0.0)
        assert b.done == ["mark leaving", "drain 0"]
    b.is_gone = True
    yard.fleet.reconcile(0.0)
    assert b.done == ["mark leaving", "drain 0", "remove snapshots"]
    assert (len(yard.fleet.all_models()), yard.fleet.deaths, yard.fleet.changing) == (1, 3, [])


def test_a_changed_model_takes_over_once_it_is_complete() -> None:
    yard = Yard(a=ONE)
    assert yard.reload(a=TWO) == ConfigDiff((), ("a",), ())
    old, new = yard.made
    assert (yard.serving(), new.done, len(yard.fleet.changing)) == ([("a", ONE)], ["start"], 1)
    assert (new.replaced, old.is_reinstated) == (old, False)
    new.is_complete = True
    for _ in range(2):
        assert yard.serving() == [("a", TWO)]
        assert (new.done, old.done) == (["start", "adopt /models/1.onnx"], [LEAVES])
    # A worker that dies while it leaves: what it had is the new one's.
    old.dispatcher.queued_by_tenant = {DEFAULT_TENANT: 1}
    yard.fleet.reconcile(0.0)
    assert new.done[2:] == ["adopt /models/1.onnx"]
    old.is_gone = True
    yard.fleet.reconcile(0.0)
    assert [each.config for each in yard.fleet.all_models()] == [TWO]


def test_where_the_same_is_loaded_for_the_change_nothing_is() -> None:
    yard = Yard(a=ONE)
    assert yard.reload(a=TWO).changed == ("a",)
    less = replace(ONE, batching=BatchingConfig(8, exact=False))
    # It discards what loads, too.
    assert yard.reload(a=less).changed == ("a",)
    assert [each.done for each in yard.made] == [[], ["start", "drain 0"]]
    assert yard.serving() == [("a", less)]


def test_a_change_that_fails_leaves_what_serves_and_says_why() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    old, failed = yard.made
    failed.has_failed = True
    assert yard.serving() == [("a", ONE)]
    assert old.note == "the changed configuration is not in force: no such file"
    assert failed.done == ["start", "drain 0"]
    assert (failed.replaced, old.is_reinstated) == (old, True)
    # The next reload tries it again.
    assert yard.reload(a=TWO) == ConfigDiff((), ("a",), ())
    assert (old.note, len(yard.made)) == ("", 3)


def test_what_does_not_serve_is_replaced_at_once() -> None:
    yard = Yard(a=ONE)
    yard.made[0].may_serve_soon = False
    yard.reload(a=TWO)
    assert yard.serving() == [("a", TWO)]
    assert yard.made[1].done == ["start", "adopt /models/1.onnx"]


def test_asking_twice_for_the_same_change_is_asking_once_and_a_change_of_mind_discards_what_loads() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    assert yard.reload(a=TWO) == ConfigDiff((), (), ())
    assert yard.reload(a=THREE) == ConfigDiff((), ("a",), ())
    assert [each.is_draining for each in yard.made] == [False, True, False]
    assert yard.reload(a=ONE) == ConfigDiff((), ("a",), ())
    assert [each.is_draining for each in yard.made] == [False, True, True]
    assert (yard.serving(), yard.made[0].successor) == ([("a", ONE)], None)


def test_a_model_that_is_removed_takes_what_loads_for_it_along_and_leaves_nothing_to_the_next_of_its_name() -> None:
    yard = Yard(a=ONE)
    yard.made[0].dispatcher.is_idle = False
    yard.reload(a=TWO)
    yard.reload()
    assert (yard.made[1].is_draining, len(yard.fleet.all_models())) == (True, 2)
    yard.reload(a=TWO)
    yard.fleet.reconcile(0.0)
    assert (yard.made[0].done, yard.made[2].done) == (["mark leaving"], ["start"])


@pytest.mark.parametrize("configs", [{"a": TWO, "b": TWO}, {"b": TWO}])
def test_while_a_model_is_updated_nothing_changes(configs: dict[str, ModelConfig]) -> None:
    yard = Yard(a=ONE)
    yard.made[0].is_updating = True
    with pytest.raises(Unavailable, match=r"^a is being updated: try again after the update$"):
        yard.reload(**configs)
    assert (yard.serving(), len(yard.made)) == ([("a", ONE)], 1)


def test_a_name_never_uses_a_number_twice() -> None:
    yard = Yard(a=ONE, b=ONE)
    yard.reload(b=ONE)
    yard.reload(a=TWO, b=ONE)
    a, b, again = yard.made
    assert again.numbers is a.numbers
    assert b.numbers is not a.numbers


def test_the_end_is_told_to_everyone() -> None:
    yard = Yard(a=ONE, b=TWO, c=THREE)
    yard.reload(a=TWO, b=TWO)
    yard.fleet.drain(0.0)
    assert [each.is_draining for each in yard.made] == [True] * 4
