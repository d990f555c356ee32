"""Three nodes on one machine, eight clients with books, and all that can happen to nodes and weights meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.raynodes import Nodes, nodes
from testkit.waiting import until

from .asking import LoadClients, SampleRequests

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def three() -> Iterator[Nodes]:
    """A cluster of three nodes."""
    with nodes(3) as made:
        yield made


def test_each_request_is_answered_once_and_right_whatever_happens_to_nodes(
    three: Nodes, zoo: Path, questions: SampleRequests
) -> None:
    a = {"model": str(zoo / "a.onnx"), "workers": 1}
    b = {**a, "model": str(zoo / "b.onnx"), "name": "a"}
    three.run(three.application("m", a, num_replicas=1))
    with LoadClients(three.http, "/m/v2/models/a/infer", questions) as crowd:
        crowd.wait(100)

        three.run(three.application("m", a, num_replicas=3))
        assert len(three.pids("weightd_ray.daemon_supervisor")) == 3
        crowd.wait(100)

        killed = three.workers[-1]
        three.kill(killed)
        # Its guard and its daemon are nobody's children there: they end by themselves, and leave nothing.
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 2, "the guard of the killed node ends")
        until(lambda: len(list((three.base / "work").glob("*"))) == 2, "its files are gone")
        crowd.wait(100)

        three.workers.append(three.add())
        until(lambda: three.running("m") == 3, "the new node has a replica", 90)
        crowd.wait(100)

        crowd.allowed = ("a", "b")
        three.run(three.application("m", b, num_replicas=3))
        crowd.allowed = ("b",)
        crowd.wait(100)

        three.run(three.application("m", b, num_replicas=1))
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 1, "the others leave nothing")
        crowd.wait(100)
    print(crowd.books.sent, crowd.books.outcomes)
    crowd.books.check()


def test_replicas_come_and_go_with_the_load(three: Nodes, zoo: Path, questions: SampleRequests) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 1.5, "upscale_delay_s": 0.5}
    patience = {"downscale_delay_s": 2.0, "metrics_interval_s": 0.5, "look_back_period_s": 1.0}
    a = {"model": str(zoo / "a.onnx"), "workers": 1}
    three.run(three.application("m", a, autoscaling_config={**scaling, **patience}))
    path = "/m/v2/models/a/infer"
    with LoadClients(three.http, path, questions, count=16) as many:
        until(lambda: three.running("m") == 3, "each node has a replica", 120)
        many.wait(100)
    # One client has one request at most, fewer than a replica is meant to have: those that go answer what they have.
    with LoadClients(three.http, path, questions, count=1) as few:
        until(lambda: three.running("m") == 1, "the load is that of one replica", 120)
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 1, "the others leave nothing")
        few.wait(20)
    for crowd in (many, few):
        print(crowd.books.sent, crowd.books.outcomes)
        crowd.books.check()
