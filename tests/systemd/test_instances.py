"""Two instances of weightd@.service: separate configurations, sockets and weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import materials
from .manager import Manager
from .service import MLP, Weightd

pytestmark = [pytest.mark.e2e, pytest.mark.long]

OTHER = {**MLP, "path": materials.OTHER_MODEL}


@pytest.fixture
def two(manager: Manager) -> Iterator[tuple[Weightd, Weightd]]:
    first, second = Weightd(manager, "red"), Weightd(manager, "blue")
    for each in (first, second):
        each.reset()
    second.configure({"mlp": OTHER})
    yield first, second
    for each in (first, second):
        each.reset()
        manager.run(["systemctl", "stop", each.socket])


def test_instances_are_independent(two: tuple[Weightd, Weightd]) -> None:
    first, second = two
    first.ask()  # starts the service by its socket
    second.start()
    assert second.report("ask", materials.QUESTIONS)["wrong"], "another model"
    first.ask()
    assert first.show("Slice") == second.show("Slice") == "weightd.slice"
    workers = first.wait_for_workers()
    second.restart()
    second.stop()
    first.ask()
    assert first.workers() == workers
    first.restart()
    assert first.wait_for_workers() == workers
    first.stop()
    for each in (first, second):
        assert all(each.manager.path(path).is_socket() for path in each.sockets)
