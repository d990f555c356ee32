"""How many workers attach at once, by what the host has."""

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


class Host:
    """A host with these cores and MiB."""

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
def test_as_many_as_cores_and_memory_allow_and_one_always(cores: int, free_mib: int, expected: int) -> None:
    host = Host(cores, free_mib)
    assert host.attaching.attach_limit(host.generation()) == expected


@pytest.mark.parametrize(("cores", "free_mib"), [(5, 100 * NEED), (100, 5 * NEED)])
def test_what_others_build_is_taken_off(cores: int, free_mib: int) -> None:
    """Their holders as their workers; what they have taken already is free no more, so this is never too much."""
    host = Host(cores, free_mib)
    ours, theirs = host.generation(), host.generation()
    attach(ours, 2)
    assert host.attaching.attach_limit(ours) == 5
    attach(theirs, 1, Role.HOLDER)
    attach(theirs, 1)
    assert (host.attaching.attach_limit(ours), host.attaching.attach_limit(theirs)) == (3, 3)
    attach(theirs, 20)
    assert host.attaching.attach_limit(ours) == 1


def test_what_has_ended_is_forgotten() -> None:
    host = Host(4, 100 * NEED)
    ended = host.generation()
    ended.fail(FailureReason("no such file"), 0.0)
    host.generation()
    assert [each.generation for each in host.attaching._generations].count(ended) == 0  # pyright: ignore[reportPrivateUsage]
