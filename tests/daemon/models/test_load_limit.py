"""Tests of the number of workers that may attach at the same time."""

from __future__ import annotations

import pytest

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.progress import FailureReason
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec
from weightd_daemon.generations.states import ChildEvent
from weightd_daemon.models.load_limit import LoadLimiter
from weightd_daemon.platform.memory import MIB

ATTACHING = ChildEvent.HELLO, ChildEvent.ADMIT, ChildEvent.ATTACH
NEED = 2 * 100 + 64


class HostHarness:
    """Host with this number of cores and this much free memory."""

    def __init__(self, cores: int, free_mib: int) -> None:
        self.free_mib = free_mib
        self.attaching = LoadLimiter(lambda: self.free_mib * MIB, lambda: cores)

    def generation(self, nbytes: int = 100 * MIB) -> Generation:
        generation = Generation(
            GenerationSetup("m.1", GenerationSpec(4, 100.0), attach_limit=self.attaching.attach_limit)
        )
        self.attaching.add(generation, lambda: nbytes, 2.0)
        return generation


def attach(generation: Generation, count: int, role: Role = Role.WORKER) -> None:
    for number in range(count):
        child = generation.processes.add(f"{role}{number}", role, "cpu")
        for event in ATTACHING if role is Role.WORKER else (ChildEvent.HELLO, ChildEvent.BUILD):
            child.advance(event)


@pytest.mark.parametrize(
    ("cores", "free_mib", "expected"),
    [(4, 100 * NEED, 4), (4, 3 * NEED, 3), (4, 3 * NEED - 1, 2), (4, NEED - 1, 1), (4, 0, 1), (1, 100 * NEED, 1)],
)
def test_limit_follows_cores_and_memory_but_is_at_least_one(cores: int, free_mib: int, expected: int) -> None:
    host = HostHarness(cores, free_mib)
    assert host.attaching.attach_limit(host.generation()) == expected


@pytest.mark.parametrize(("cores", "free_mib"), [(5, 100 * NEED), (100, 5 * NEED)])
def test_processes_of_other_generations_reduce_limit(cores: int, free_mib: int) -> None:
    """Holders count like workers. Free memory already excludes what they use, so the limit is never too high."""
    host = HostHarness(cores, free_mib)
    ours, theirs = host.generation(), host.generation()
    attach(ours, 2)
    assert host.attaching.attach_limit(ours) == 5
    attach(theirs, 1, Role.HOLDER)
    attach(theirs, 1)
    assert (host.attaching.attach_limit(ours), host.attaching.attach_limit(theirs)) == (3, 3)
    attach(theirs, 20)
    assert host.attaching.attach_limit(ours) == 1


def test_ended_generations_are_removed() -> None:
    host = HostHarness(4, 100 * NEED)
    ended = host.generation()
    ended.fail(FailureReason("no such file"), 0.0)
    host.generation()
    assert [each.generation for each in host.attaching._generations].count(ended) == 0  # pyright: ignore[reportPrivateUsage]
