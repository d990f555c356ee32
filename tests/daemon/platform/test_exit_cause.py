from __future__ import annotations

import signal

import pytest

from weightd_daemon.platform.exit_cause import ExitCause, ExitClassifier, ExitInitiator

PERHAPS = "possibly by the kernel, out of memory: see dmesg"


@pytest.mark.parametrize(
    ("end", "text", "blames", "killed"),
    [
        (ExitCause(0), "exited with status 0", True, False),
        (ExitCause(65, "no such file"), "exited with status 65: no such file", True, False),
        (ExitCause(-signal.SIGSEGV, "where"), "killed by SIGSEGV: where", True, True),
        (ExitCause(-signal.SIGFPE), "killed by SIGFPE", True, True),
        (ExitCause(-signal.SIGABRT), "killed by SIGABRT", True, True),
        (
            ExitCause(-signal.SIGABRT, initiator=ExitInitiator.DAEMON),
            "killed by SIGABRT (sent by weightd)",
            False,
            True,
        ),
        (ExitCause(-signal.SIGTERM), "killed by SIGTERM", False, True),
        (ExitCause(-signal.SIGKILL), f"killed by SIGKILL ({PERHAPS})", False, True),
        (
            ExitCause(-signal.SIGKILL, initiator=ExitInitiator.KERNEL),
            "killed by SIGKILL (the kernel was out of memory)",
            False,
            True,
        ),
        (ExitCause(-63), "killed by signal 63", False, True),
        (ExitCause(None, initiator=ExitInitiator.SHIM), "its shim exited", False, True),
        (ExitCause(None, "no such interpreter"), "no such interpreter", False, False),
    ],
)
def test_describes_exits_and_possible_faults(end: ExitCause, text: str, blames: bool, killed: bool) -> None:
    assert (str(end), end.may_be_own_fault, end.is_killed) == (text, blames, killed)


def test_classifies_the_initiator() -> None:
    kills = 7
    classifier = ExitClassifier(lambda: kills)
    assert classifier.classify("a", -signal.SIGKILL, "") == ExitCause(-signal.SIGKILL)
    kills += 2
    assert classifier.classify("crash", -signal.SIGSEGV, "last lines") == ExitCause(-signal.SIGSEGV, "last lines")
    ends = [classifier.classify(name, -signal.SIGKILL, "").initiator for name in "bcd"]
    assert ends == [ExitInitiator.KERNEL, ExitInitiator.KERNEL, ExitInitiator.UNKNOWN]
    classifier.record_signal("e")
    assert classifier.classify("e", -signal.SIGABRT, "") == ExitCause(-signal.SIGABRT, initiator=ExitInitiator.DAEMON)
    assert classifier.classify("e", -signal.SIGABRT, "") == ExitCause(-signal.SIGABRT)
    classifier.record_signal("f")
    assert classifier.classify("f", 0, "") == ExitCause(0)
    assert classifier.classify("g", None, "last lines") == ExitCause(None, "last lines", ExitInitiator.SHIM)
