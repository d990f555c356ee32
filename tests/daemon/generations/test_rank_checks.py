"""Tests of the checks that tell whether a process failed because of another process of its group."""

from __future__ import annotations

import signal

import pytest

from weightd_daemon.generations import rank_checks
from weightd_daemon.generations.actions import Role
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator


@pytest.mark.parametrize(
    ("text", "is_peer_failure"),
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
def test_peer_failure_text(text: str, *, is_peer_failure: bool) -> None:
    assert rank_checks.is_peer_failure_text(text) is is_peer_failure
    assert rank_checks.is_peer_failure_exit(Role.RANK, ExitCause(1, text), has_connected=True) is is_peer_failure


@pytest.mark.parametrize(
    ("role", "end", "has_connected", "is_peer_failure"),
    [
        (Role.RANK, ExitCause(143), True, True),
        (Role.RANK, ExitCause(-signal.SIGTERM), False, True),
        (Role.RANK, ExitCause(1), True, False),
        (Role.RANK, ExitCause(-signal.SIGKILL), True, False),
        (Role.RANK, ExitCause(None, "no such file"), False, False),
        (Role.BROKER, ExitCause(1), True, True),
        (Role.BROKER, ExitCause(0), True, True),
        (Role.BROKER, ExitCause(3), True, False),
        # The broker's port is in use.
        (Role.BROKER, ExitCause(1), False, False),
        (Role.BROKER, ExitCause(-signal.SIGKILL), True, False),
        (Role.BROKER, ExitCause(143), True, False),
    ],
)
def test_peer_failure_exit(role: Role, end: ExitCause, *, has_connected: bool, is_peer_failure: bool) -> None:
    assert rank_checks.is_peer_failure_exit(role, end, has_connected=has_connected) is is_peer_failure


@pytest.mark.parametrize(
    ("end", "is_independent"),
    [
        (ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON), False),
        (ExitCause(-signal.SIGKILL, initiator=ExitInitiator.KERNEL), True),
        (ExitCause(-signal.SIGKILL), True),
        # The daemon has sent a signal, but not SIGSEGV: the process crashed by itself.
        (ExitCause(-signal.SIGSEGV, initiator=ExitInitiator.DAEMON), True),
        (ExitCause(1), True),
        (ExitCause(0), True),
        (ExitCause(None, initiator=ExitInitiator.SHIM), False),
        (ExitCause(None), False),
    ],
)
def test_independent_exit(end: ExitCause, *, is_independent: bool) -> None:
    assert rank_checks.is_independent_exit(end) is is_independent
