"""Each sign that a process may have been lost because of another one, and what is none."""

from __future__ import annotations

import signal

import pytest

from weightd_daemon.generations import rank_checks
from weightd_daemon.generations.actions import Role
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator


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
    assert rank_checks.is_peer_failure_text(words) is is_symptom
    assert rank_checks.is_peer_failure_exit(Role.RANK, ExitCause(1, words), has_connected=True) is is_symptom


@pytest.mark.parametrize(
    ("role", "end", "have_met", "is_symptom"),
    [
        (Role.RANK, ExitCause(143), True, True),
        (Role.RANK, ExitCause(-signal.SIGTERM), False, True),
        (Role.RANK, ExitCause(1), True, False),
        (Role.RANK, ExitCause(-signal.SIGKILL), True, False),
        (Role.RANK, ExitCause(None, "no such file"), False, False),
        (Role.BROKER, ExitCause(1), True, True),
        (Role.BROKER, ExitCause(0), True, True),
        (Role.BROKER, ExitCause(3), True, False),
        # Its port is taken.
        (Role.BROKER, ExitCause(1), False, False),
        (Role.BROKER, ExitCause(-signal.SIGKILL), True, False),
        (Role.BROKER, ExitCause(143), True, False),
    ],
)
def test_how_a_process_ends_because_of_another_one(
    role: Role, end: ExitCause, *, have_met: bool, is_symptom: bool
) -> None:
    assert rank_checks.is_peer_failure_exit(role, end, has_connected=have_met) is is_symptom


@pytest.mark.parametrize(
    ("end", "is_own"),
    [
        (ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON), False),
        (ExitCause(-signal.SIGKILL, initiator=ExitInitiator.KERNEL), True),
        (ExitCause(-signal.SIGKILL), True),
        # The daemon has sent it a signal, but no such one.
        (ExitCause(-signal.SIGSEGV, initiator=ExitInitiator.DAEMON), True),
        (ExitCause(1), True),
        (ExitCause(0), True),
        (ExitCause(None, initiator=ExitInitiator.SHIM), False),
        (ExitCause(None), False),
    ],
)
def test_who_had_ended_before_it_was_killed(end: ExitCause, *, is_own: bool) -> None:
    assert rank_checks.is_independent_exit(end) is is_own
