"""Clusters of three nodes on one machine, under load: nodes that die, new nodes, updates and autoscaling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.raynodes import Nodes, nodes
from testkit.waiting import until

from .http_clients import LoadClients, SampleRequests

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def three() -> Iterator[Nodes]:
    with nodes(3) as made:
        yield made


def test_answers_are_right_while_nodes_die_and_join(three: Nodes, zoo: Path, questions: SampleRequests) -> None:
    a = {"model": str(zoo / "a.onnx"), "workers": 1}
    b = {**a, "model": str(zoo / "b.onnx"), "name": "a"}
    three.run(three.application("m", a, num_replicas=1))
    with LoadClients(three.http, "/m/v2/models/a/infer", questions) as clients:
        clients.wait(100)

        three.run(three.application("m", a, num_replicas=3))
        assert len(three.pids("weightd_ray.daemon_supervisor")) == 3
        clients.wait(100)

        killed = three.workers[-1]
        three.kill(killed)
        # The supervisor and the daemon are not children of a process of the node, so they must exit by themselves.
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 2, "the supervisor of the killed node exits")
        until(lambda: len(list((three.base / "work").glob("*"))) == 2, "its files are deleted")
        clients.wait(100)

        three.workers.append(three.add())
        until(lambda: three.running("m") == 3, "the new node has a replica", 90)
        clients.wait(100)

        clients.allowed = ("a", "b")
        three.run(three.application("m", b, num_replicas=3))
        clients.allowed = ("b",)
        clients.wait(100)

        three.run(three.application("m", b, num_replicas=1))
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 1, "the other supervisors exit")
        clients.wait(100)
    print(clients.results.sent, clients.results.outcomes)
    clients.results.check()


def test_number_of_replicas_follows_load(three: Nodes, zoo: Path, questions: SampleRequests) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 1.5, "upscale_delay_s": 0.5}
    patience = {"downscale_delay_s": 2.0, "metrics_interval_s": 0.5, "look_back_period_s": 1.0}
    a = {"model": str(zoo / "a.onnx"), "workers": 1}
    three.run(three.application("m", a, autoscaling_config={**scaling, **patience}))
    path = "/m/v2/models/a/infer"
    with LoadClients(three.http, path, questions, count=16) as many:
        until(lambda: three.running("m") == 3, "each node has a replica", 120)
        many.wait(100)
    # One client has at most one request in flight, fewer than the target of one replica; stopping replicas finish their
    # requests.
    with LoadClients(three.http, path, questions, count=1) as few:
        until(lambda: three.running("m") == 1, "one replica is left", 120)
        until(lambda: len(three.pids("weightd_ray.daemon_supervisor")) == 1, "the other supervisors exit")
        few.wait(20)
    for clients in (many, few):
        print(clients.results.sent, clients.results.outcomes)
        clients.results.check()
