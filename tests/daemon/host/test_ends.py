from __future__ import annotations

import signal

import pytest

from weightd.daemon.host.ends import By, Coroner, End


@pytest.mark.parametrize(
    ("end", "text", "blames"),
    [
        (End(0), "exited with status 0", True),
        (End(65, "no such file"), "exited with status 65: no such file", True),
        (End(-signal.SIGSEGV, "where"), "killed by SIGSEGV: where", True),
        (End(-signal.SIGFPE), "killed by SIGFPE", True),
        (End(-signal.SIGABRT), "killed by SIGABRT", True),
        (End(-signal.SIGABRT, by=By.DAEMON), "killed by SIGABRT (weightd has ended it)", False),
        (End(-signal.SIGTERM), "killed by SIGTERM", False),
        (End(-signal.SIGKILL), "killed by SIGKILL (if nobody sent it, the kernel was out of memory: see dmesg)", False),
        (End(-signal.SIGKILL, by=By.KERNEL), "killed by SIGKILL (the kernel was out of memory)", False),
        (End(-63), "killed by signal 63", False),
        (End(None, by=By.KEEPER), "its keeper is lost", False),
        (End(None, "no such interpreter"), "no such interpreter", False),
    ],
)
def test_an_end_says_what_it_was_and_whether_what_ran_may_be_why(end: End, text: str, blames: bool) -> None:
    assert (str(end), end.blames) == (text, blames)


@pytest.mark.parametrize(
    ("end", "killed"),
    [(End(-9), True), (End(None, by=By.KEEPER), True), (End(1), False), (End(None, "no such interpreter"), False)],
)
def test_who_was_killed_may_do_better_the_next_time(end: End, killed: bool) -> None:
    assert end.killed is killed


def test_who_has_ended_a_child_is_found_out() -> None:
    kills = 7
    coroner = Coroner(lambda: kills)
    assert coroner.end("a", -signal.SIGKILL, "") == End(-signal.SIGKILL)
    kills += 2
    assert coroner.end("crash", -signal.SIGSEGV, "words") == End(-signal.SIGSEGV, "words")
    ends = [coroner.end(name, -signal.SIGKILL, "").by for name in "bcd"]
    assert ends == [By.KERNEL, By.KERNEL, By.UNKNOWN]
    coroner.signalled("e")
    assert coroner.end("e", -signal.SIGABRT, "") == End(-signal.SIGABRT, by=By.DAEMON)
    assert coroner.end("e", -signal.SIGABRT, "") == End(-signal.SIGABRT)
    coroner.signalled("f")
    assert coroner.end("f", 0, "") == End(0)
    assert coroner.end("g", None, "words") == End(None, "words", By.KEEPER)
