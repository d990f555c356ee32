from __future__ import annotations

import signal

import pytest

from weightd.daemon.host.ends import By, Coroner, End

PERHAPS = "if nobody sent it, the kernel was out of memory: see dmesg"


@pytest.mark.parametrize(
    ("end", "text", "blames", "killed"),
    [
        (End(0), "exited with status 0", True, False),
        (End(65, "no such file"), "exited with status 65: no such file", True, False),
        (End(-signal.SIGSEGV, "where"), "killed by SIGSEGV: where", True, True),
        (End(-signal.SIGFPE), "killed by SIGFPE", True, True),
        (End(-signal.SIGABRT), "killed by SIGABRT", True, True),
        (End(-signal.SIGABRT, initiator=By.DAEMON), "killed by SIGABRT (weightd has ended it)", False, True),
        (End(-signal.SIGTERM), "killed by SIGTERM", False, True),
        (End(-signal.SIGKILL), f"killed by SIGKILL ({PERHAPS})", False, True),
        (End(-signal.SIGKILL, initiator=By.KERNEL), "killed by SIGKILL (the kernel was out of memory)", False, True),
        (End(-63), "killed by signal 63", False, True),
        (End(None, initiator=By.SHIM), "its keeper is lost", False, True),
        (End(None, "no such interpreter"), "no such interpreter", False, False),
    ],
)
def test_an_end_says_what_it_was_and_whether_what_ran_may_be_why(
    end: End, text: str, blames: bool, killed: bool
) -> None:
    assert (str(end), end.may_be_own_fault, end.is_killed) == (text, blames, killed)


def test_who_has_ended_a_child_is_found_out() -> None:
    kills = 7
    coroner = Coroner(lambda: kills)
    assert coroner.classify("a", -signal.SIGKILL, "") == End(-signal.SIGKILL)
    kills += 2
    assert coroner.classify("crash", -signal.SIGSEGV, "words") == End(-signal.SIGSEGV, "words")
    ends = [coroner.classify(name, -signal.SIGKILL, "").initiator for name in "bcd"]
    assert ends == [By.KERNEL, By.KERNEL, By.UNKNOWN]
    coroner.record_signal("e")
    assert coroner.classify("e", -signal.SIGABRT, "") == End(-signal.SIGABRT, initiator=By.DAEMON)
    assert coroner.classify("e", -signal.SIGABRT, "") == End(-signal.SIGABRT)
    coroner.record_signal("f")
    assert coroner.classify("f", 0, "") == End(0)
    assert coroner.classify("g", None, "words") == End(None, "words", By.SHIM)
