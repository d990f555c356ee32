"""Three nodes on one machine, eight clients with books, and all that can happen to nodes and weights meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.raynodes import Nodes, nodes
from testkit.waiting import until

from .asking import Crowd, Questions

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def three() -> Iterator[Nodes]:
    """A cluster of three nodes."""
    with nodes(3) as made:
        yield made


def test_each_request_is_answered_once_and_right_whatever_happens_to_nodes(
    three: Nodes, zoo: Path, questions: Questions
) -> None:
    a = {"model": str(zoo / "a.onnx"), "workers": 1}
    b = {**a, "model": str(zoo / "b.onnx"), "name": "a"}
    three.run(three.application("m", a, num_replicas=1))
    with Crowd(three.http, "/m/v2/models/a/infer", questions) as crowd:
        crowd.wait(100)

        three.run(three.application("m", a, num_replicas=3))
        assert len(three.pids("weightd.ray.guard")) == 3
        crowd.wait(100)

        killed = three.workers[-1]
        three.kill(killed)
        # Its guard and its daemon are nobody's children there: they end by themselves, and leave nothing.
        until(lambda: len(three.pids("weightd.ray.guard")) == 2, "the guard of the killed node ends")
        until(lambda: len(list((three.base / "rooms").glob("*"))) == 2, "its files are gone")
        crowd.wait(100)

        three.workers.append(three.add())
        until(lambda: three.running("m") == 3, "the new node has a replica", 90)
        crowd.wait(100)

        crowd.allowed = ("a", "b")
        three.run(three.application("m", b, num_replicas=3))
        crowd.allowed = ("b",)
        crowd.wait(100)

        three.run(three.application("m", b, num_replicas=1))
        until(lambda: len(three.pids("weightd.ray.guard")) == 1, "the others leave nothing")
        crowd.wait(100)
    print(crowd.books.sent, crowd.books.outcomes)
    crowd.books.check()
