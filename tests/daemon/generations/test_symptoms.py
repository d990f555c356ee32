"""Each sign that a process may have been lost because of another one, and what is none."""

from __future__ import annotations

import signal

import pytest

from weightd.daemon.generations import symptoms
from weightd.daemon.generations.actions import Role
from weightd.daemon.host.ends import By, End


@pytest.mark.parametrize(
    ("words", "is_symptom"),
    [
        ("RuntimeError: Launch kernel failed, name:AllReduce", True),
        ("An error occurred in the previous step, please check", True),
        ("EI0002: notify wait timeout", True),
        ("EI0006: wait socket establish timeout", True),
        ("EI0019: the port is in use", False),
        ("step: expected 8, got 9", False),
        ("", False),
    ],
)
def test_what_a_library_says_because_of_another_process(words: str, *, is_symptom: bool) -> None:
    assert symptoms.is_peer_failure_text(words) is is_symptom
    assert symptoms.is_peer_failure_exit(Role.RANK, End(1, words), has_connected=True) is is_symptom


@pytest.mark.parametrize(
    ("role", "end", "have_met", "is_symptom"),
    [
        (Role.RANK, End(143), True, True),
        (Role.RANK, End(-signal.SIGTERM), False, True),
        (Role.RANK, End(1), True, False),
        (Role.RANK, End(-signal.SIGKILL), True, False),
        (Role.RANK, End(None, "no such file"), False, False),
        (Role.BROKER, End(1), True, True),
        (Role.BROKER, End(0), True, True),
        (Role.BROKER, End(3), True, False),
        # Its port is taken.
        (Role.BROKER, End(1), False, False),
        (Role.BROKER, End(-signal.SIGKILL), True, False),
        (Role.BROKER, End(143), True, False),
    ],
)
def test_how_a_process_ends_because_of_another_one(role: Role, end: End, *, have_met: bool, is_symptom: bool) -> None:
    assert symptoms.is_peer_failure_exit(role, end, has_connected=have_met) is is_symptom


@pytest.mark.parametrize(
    ("end", "is_own"),
    [
        (End(-signal.SIGKILL, initiator=By.DAEMON), False),
        (End(-signal.SIGKILL, initiator=By.KERNEL), True),
        (End(-signal.SIGKILL), True),
        # The daemon has sent it a signal, but no such one.
        (End(-signal.SIGSEGV, initiator=By.DAEMON), True),
        (End(1), True),
        (End(0), True),
        (End(None, initiator=By.SHIM), False),
        (End(None), False),
    ],
)
def test_who_had_ended_before_it_was_killed(end: End, *, is_own: bool) -> None:
    assert symptoms.is_independent_exit(end) is is_own
