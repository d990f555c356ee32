"""What a reload does to models, which are a few switches here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.models.fleet import Change, Fleet
from weightd.daemon.models.model import Model
from weightd.daemon.models.sources import Numbers
from weightd.protocol.errors import Unavailable

ONE, TWO, THREE = (ModelConfig(path=f"/models/{number}.onnx") for number in (1, 2, 3))


class FakeModel:
    """Serves, fails and is gone when a test says so, and keeps a record of what it is told."""

    def __init__(self, name: str, config: ModelConfig, numbers: Numbers) -> None:
        self.name = name
        self.config = config
        self.numbers = numbers
        self.desk = SimpleNamespace(scheduler=SimpleNamespace(idle=True, queued=0))
        self.successor: FakeModel | None = None
        self.note = ""
        self.updating = self.serves = self.complete = self.has_failed = self.draining = self.gone = False
        self.deaths = 0
        self.done: list[str] = []

    @property
    def will_serve(self) -> bool:
        return self.serves

    def start(self, now: float) -> None:
        self.done.append("start")

    def will_leave(self) -> None:
        self.done.append("will leave")

    def drain(self, now: float, *, patience: float = 0.0, replaced: bool = False) -> None:
        self.draining = True
        self.done.append(f"drain {patience:g}{' replaced' if replaced else ''}")

    def adopt(self, old: FakeModel, now: float) -> None:
        self.done.append(f"adopt {old.config.path}")

    def dispose(self) -> None:
        self.done.append("dispose")

    def unready(self, now: float) -> str:
        return "no such file"


class Yard:
    """A fleet, and every model that it has made."""

    def __init__(self, **configs: ModelConfig) -> None:
        self.made: list[FakeModel] = []
        self.fleet = Fleet(self.make)
        self.fleet.start(configs, 0.0)
        for each in self.made:
            each.serves = each.complete = True
            each.done.clear()

    def make(self, name: str, config: ModelConfig, numbers: Numbers) -> Model:
        self.made.append(FakeModel(name, config, numbers))
        return cast(Model, self.made[-1])

    def reload(self, **configs: ModelConfig) -> Change:
        change = self.fleet.compare(configs)
        self.fleet.apply(change, configs, 0.0)
        return change

    def serving(self) -> dict[str, str]:
        return {name: model.config.path for name, model in self.fleet.models.items()}

    @property
    def last(self) -> FakeModel:
        return self.made[-1]


def test_what_has_not_changed_is_not_touched() -> None:
    yard = Yard(a=ONE)
    change = yard.reload(a=ONE)
    assert (change, str(change)) == (Change((), (), ()), "no model changes")
    assert (len(yard.made), yard.made[0].done) == (1, [])


def test_a_new_model_loads_and_takes_requests_at_once() -> None:
    yard = Yard(a=ONE)
    change = yard.reload(b=TWO, a=ONE)
    assert (change, str(change)) == (Change(("b",), (), ()), "added b")
    assert (yard.last.name, yard.last.done) == ("b", ["start"])
    assert list(yard.fleet.models) == ["b", "a"]


def test_a_model_that_is_removed_finishes_what_it_has_and_leaves() -> None:
    yard = Yard(a=ONE, b=TWO)
    b = yard.last
    b.desk.scheduler.idle = False
    b.deaths = 3
    assert yard.reload(a=ONE) == Change((), (), ("b",))
    assert yard.serving() == {"a": "/models/1.onnx"}
    yard.fleet.settle(0.0)
    assert (b.done, len(yard.fleet.everyone())) == (["will leave"], 2)
    b.desk.scheduler.idle = True
    yard.fleet.settle(0.0)
    assert b.done == ["will leave", "drain 0"]
    b.gone = True
    yard.fleet.settle(0.0)
    assert b.done == ["will leave", "drain 0", "dispose"]
    assert len(yard.fleet.everyone()) == 1
    assert yard.fleet.deaths == 3


def test_a_changed_model_takes_over_once_it_is_complete() -> None:
    yard = Yard(a=ONE)
    old = yard.last
    assert yard.reload(a=TWO) == Change((), ("a",), ())
    new = yard.last
    assert new.done == ["start"]
    new.serves = True
    yard.fleet.settle(0.0)
    assert yard.serving() == {"a": "/models/1.onnx"}
    new.complete = True
    yard.fleet.settle(0.0)
    assert yard.serving() == {"a": "/models/2.onnx"}
    assert new.done[:2] == ["start", "adopt /models/1.onnx"]
    assert old.done == [f"drain {ONE.predict_timeout:g} replaced"]
    # A worker that dies while it leaves: what it had is the new one's.
    new.done.clear()
    yard.fleet.settle(0.0)
    assert new.done == []
    old.desk.scheduler.queued = 1
    yard.fleet.settle(0.0)
    assert new.done == ["adopt /models/1.onnx"]
    old.gone = True
    yard.fleet.settle(0.0)
    assert [id(each) for each in yard.fleet.everyone()] == [id(new)]


def test_a_change_that_fails_leaves_what_serves_and_says_why() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    failed = yard.last
    failed.has_failed = True
    yard.fleet.settle(0.0)
    assert yard.serving() == {"a": "/models/1.onnx"}
    assert yard.made[0].note == "the changed configuration is not in force: no such file"
    assert failed.done == ["start", "drain 0"]
    # The next reload tries it again.
    assert yard.reload(a=TWO) == Change((), ("a",), ())
    assert yard.made[0].note == ""
    assert yard.last is not failed


def test_what_does_not_serve_is_replaced_at_once() -> None:
    yard = Yard(a=ONE)
    yard.made[0].serves = False
    yard.reload(a=TWO)
    yard.fleet.settle(0.0)
    assert yard.serving() == {"a": "/models/2.onnx"}
    assert "adopt /models/1.onnx" in yard.last.done


def test_asking_twice_for_the_same_change_is_asking_once() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    assert yard.reload(a=TWO) == Change((), (), ())
    assert len(yard.made) == 2


def test_a_change_of_mind_discards_what_loads() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    second = yard.last
    assert yard.reload(a=THREE) == Change((), ("a",), ())
    assert second.draining
    third = yard.last
    assert yard.reload(a=ONE) == Change((), ("a",), ())
    assert third.draining
    assert yard.made[0].successor is None
    assert yard.serving() == {"a": "/models/1.onnx"}


def test_a_model_that_is_removed_takes_what_loads_for_it_along() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    yard.reload()
    assert yard.last.draining
    assert len(yard.fleet.everyone()) == 2


@pytest.mark.parametrize("configs", [{"a": TWO, "b": TWO}, {"b": TWO}])
def test_while_a_model_is_updated_nothing_changes(configs: dict[str, ModelConfig]) -> None:
    yard = Yard(a=ONE)
    yard.made[0].updating = True
    with pytest.raises(Unavailable, match=r"^a is being updated: try again once that is over$"):
        yard.reload(**configs)
    assert (yard.serving(), len(yard.made)) == ({"a": "/models/1.onnx"}, 1)


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
    assert [each.draining for each in yard.made] == [True] * 4


def test_what_waits_is_taken_over_before_the_old_model_would_refuse_it() -> None:
    yard = Yard(a=ONE)
    yard.reload(a=TWO)
    yard.last.complete = True
    told: list[str] = []
    yard.made[0].done = yard.last.done = told
    yard.fleet.settle(0.0)
    assert told[:2] == ["adopt /models/1.onnx", f"drain {ONE.predict_timeout:g} replaced"]


def test_one_of_the_name_of_a_model_that_finishes_what_it_has_takes_nothing_from_it() -> None:
    yard = Yard(a=ONE)
    yard.made[0].desk.scheduler.idle = False
    yard.reload()
    yard.reload(a=TWO)
    yard.fleet.settle(0.0)
    assert (yard.made[0].done, yard.last.done) == (["will leave"], ["start"])
