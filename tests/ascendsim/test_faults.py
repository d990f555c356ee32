"""Tests of injected faults: crashes, hangs, slowness, a full card, too many processes, and forks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ascendsim import Host, Switches
from ascendsim.program import Died, Program

from .support import ATTACH, Start, errors_of, share


@pytest.mark.parametrize("at", ["start", "loaded"])
def test_second_attach_crashes(start: Start, host: Host, at: str) -> None:
    host.fault("build", "crash", who="importer", skip=1, times=1, at=at)
    _, (_, second, third), handle = share(start, workers=3)
    with pytest.raises(Died, match=f"exit status -{int(signal.SIGSEGV)}"):
        second.do(ATTACH, handle=handle)
    third.do(ATTACH, handle=handle)
    assert len(host.card_state().weights.importers) == 2
    assert host.count("build") == 4


@pytest.mark.parametrize(("who", "pids", "others"), [("holder", "1", ""), ("private", "", "1")])
def test_fault_hits_only_selected_processes(program: Program, host: Host, who: str, pids: str, others: str) -> None:
    host.fault("build", "fail", who=who)
    errors_of(program, "build(path, pids=pids)", pids=pids)
    program.do("build(path, pids=others)", others=others)
    host.clear_faults()
    program.do("build(path, pids=pids)")


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("operation", ["build", "predict"])
def test_signal_handler_does_not_end_hang(program: Program, host: Host, operation: str) -> None:
    program.do("import signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\nbuild(path)")
    host.fault(operation, "hang")
    builds = host.count(operation)
    program.begin("build(path)" if operation == "build" else "predict(x)")
    while host.count(operation) == builds or not sleeps(program.pid):
        assert not program.has_answered(0.01)
    os.kill(program.pid, signal.SIGTERM)
    assert not program.has_answered(0.1)
    assert program.kill() == -signal.SIGKILL
    assert host.card_state().used == 0


def test_build_can_be_slow(program: Program, host: Host) -> None:
    host.fault("build", "slow", seconds=0.2)
    begin = time.monotonic()
    program.do("build(path)")
    assert time.monotonic() - begin >= 0.2
    program.do("build(path, target='cpu')")
    assert host.count("build") == 1


def test_card_limits_processes(start: Start, host: Host) -> None:
    assert Switches().max_processes == 63
    host.switch(max_processes=1)
    first, second = start(), start()
    first.do("build(path)")
    assert errors_of(second)[0] == "Acl open device 0 failed. ret = 507899"
    second.do("build(path, device=1)")
    first.kill()
    second.do("build(path)")


FORK = """
def child(code):
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, globals())
            os._exit(0)
        except Exception:
            os._exit(1)
    return os.waitpid(pid, 0)[1] >> 8
"""


def test_forked_child_cannot_use_card_of_parent(program: Program, host: Host) -> None:
    program.do(f"{FORK}\npid()")
    assert program.do("child('build(path)')") == 0
    program.do("build(path)")
    assert program.do("child('build(path)')") == 1
    assert program.do("child('predict(x)')") == 1
    assert program.do("predict(x)").shape == (3, 64)
    assert host.copies_of_weights() == 1


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("switch", (), {"lifetime": "forever"}),
        ("switch", (), {"misspelt": 1}),
        ("fault", ("build", "explode"), {}),
        ("fault", ("destroy", "crash"), {}),
        ("fault", ("build", "crash"), {"who": "nobody"}),
        ("fault", ("build", "crash"), {"at": "noon"}),
        ("count", ("misspelt",), {}),
    ],
)
def test_unknown_switch_is_an_error(host: Host, name: str, arguments: Any, options: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        getattr(host, name)(*arguments, **options)


def test_concurrent_changes_of_state(start: Start, host: Host) -> None:
    programs = [start() for _ in range(6)]
    for program in programs:
        program.begin("for _ in range(4): build(path); lib.model = None\nbuild(path)")
    for program in programs:
        program.result()
    assert (host.copies_of_weights(), host.count("build")) == (6, 6 * 5)
