"""What a test can order: crashes, hangs, slowness, a full card, too many processes, forks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from ascendsim import Host, Switches, ledger, models
from ascendsim.program import Died, Program

Start = Callable[..., Program]

BUILD_FAILED = "build_from_file failed! Error is Common error code."


def status_of(program: Program, code: str, **values: Any) -> int:
    with pytest.raises(Died) as died:
        program.do(code, **values)
    return died.value.status


@pytest.mark.parametrize("at", ["start", "loaded"])
def test_the_second_attach_crashes(start: Start, host: Host, path: Path, at: str) -> None:
    host.fault("build", "crash", who="importer", skip=1, times=1, at=at)
    holder, workers = start(), [start() for _ in range(3)]
    pids = ",".join(str(worker.do("pid()")) for worker in workers)
    handle = holder.do("build(path, pids=pids)", path=path, pids=pids)
    attach = "build(path, handle=handle)"
    workers[0].do(attach, path=path, handle=handle)
    assert status_of(workers[1], attach, path=path, handle=handle) == -signal.SIGSEGV
    workers[2].do(attach, path=path, handle=handle)
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert len(weights.importers) == 2
    assert host.count("build") == 4


@pytest.mark.parametrize(("who", "keys"), [("holder", {"pids": "1"}), ("private", {})])
def test_only_those_meant_suffer(start: Start, host: Host, path: Path, who: str, keys: Any) -> None:
    host.fault("build", "fail", who=who)
    program = start()
    assert program.refusal("build(path, **keys)", path=path, keys=keys).text == BUILD_FAILED
    program.do("build(path, **keys)", path=path, keys={"pids": "1"} if who == "private" else {})
    host.clear_faults()
    program.do("build(path, **keys)", path=path, keys=keys)


def test_a_predict_fails_crashes_or_lies(start: Start, host: Host, path: Path, x: Any) -> None:
    program = start()
    program.do("build(path)", path=path)
    host.fault("predict", "fail", times=1)
    assert program.refusal("predict(x)", x=x).text == "predict failed!"
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))  # not poisoned
    host.fault("predict", "garbage", skip=1, times=1)
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))
    assert not np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))
    host.fault("predict", "crash", signal=int(signal.SIGABRT))
    assert status_of(program, "predict(x)", x=x) == -signal.SIGABRT
    assert host.ledger().used == 0


@pytest.mark.parametrize("operation", ["build", "predict"])
def test_a_hang_is_not_ended_by_a_handler(start: Start, host: Host, path: Path, x: Any, operation: str) -> None:
    program = start()
    program.do("import signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))")
    if operation == "predict":
        program.do("build(path)", path=path)
    host.fault(operation, "hang")
    program.begin("build(path)" if operation == "build" else "predict(x)", path=path, x=x)
    while host.count(operation) == 0:
        assert not program.has_answered(0.01)
    assert not program.has_answered(0.1)
    os.kill(program.pid, signal.SIGTERM)
    assert not program.has_answered(0.1)
    assert program.kill() == -signal.SIGKILL
    assert host.ledger().used == 0


@pytest.mark.parametrize("how", ["switch", "fault"])
def test_a_build_can_take_long(start: Start, host: Host, path: Path, how: str) -> None:
    if how == "switch":
        host.switch(build_seconds=0.2)
    else:
        host.fault("build", "slow", seconds=0.2)
    program = start()
    begin = time.monotonic()
    program.do("build(path)", path=path)
    assert time.monotonic() - begin >= 0.2
    begin = time.monotonic()
    program.do("build(path, target='cpu')", path=path)  # what a card does costs the CPU nothing
    assert time.monotonic() - begin < 0.2


def test_a_full_card_refuses_weights(start: Start, host: Host, tmp_path: Path) -> None:
    host.switch(capacity_mib=400)
    large = models.mlp(tmp_path / "large.mindir", size_mib=300)
    program = start()
    assert program.refusal("build(path)", path=large).text == BUILD_FAILED
    assert program.errors() == ["Call aclmdlLoadFromMem failed, ret = 207001"]
    holder = start()
    host.switch(capacity_mib=600)
    assert holder.refusal("build(path, pids='1')", path=large).text == BUILD_FAILED
    assert holder.errors()[0] == "aclrtMallocPhysical failed! ret:207001"
    assert holder.errors()[-1] == "Pre init model resource failed."
    program.kill()
    holder.kill()
    start().do("build(path, pids='1')", path=large)


def test_a_full_card_refuses_a_workspace(start: Start, host: Host, path: Path) -> None:
    host.switch(capacity_mib=204, workspace_mib=4)
    program = start()
    assert program.refusal("build(path, pids='1')", path=path).text == BUILD_FAILED
    assert program.errors() == ["Call aclrtMalloc failed, err_code = 207001", "Main process failed!"]
    assert host.copies_of_weights() == 1  # leaked


def test_a_card_takes_so_many_processes(start: Start, host: Host, path: Path) -> None:
    assert Switches().max_processes == 63
    host.switch(max_processes=4)
    programs = [start() for _ in range(5)]
    for program in programs[:4]:
        program.do("build(path)", path=path)
    assert programs[4].refusal("build(path)", path=path).text == BUILD_FAILED
    assert programs[4].errors()[0].startswith("Acl open device 0 failed.")
    programs[4].do("build(path, device=1)", path=path)
    programs[0].kill()
    programs[4].do("build(path)", path=path)


FORK = """
def child(code):
    pid = os.fork()
    if pid == 0:
        try:
            exec(code, globals())
            os._exit(0)
        except Exception:
            os._exit(1)
    return pid
"""
END = "os.waitpid(pid, 0)[1]"


@pytest.mark.parametrize(("how", "status"), [("raise", 1 << 8), ("crash", int(signal.SIGSEGV))])
def test_a_forked_child_cannot_use_the_card(start: Start, host: Host, path: Path, how: str, status: int) -> None:
    host.switch(fork=how)
    program = start()
    program.do("build(path)", path=path)
    program.do(FORK, path=path)
    assert program.do(f"pid = child('build(path)')\n{END}") == status
    assert program.do(f"pid = child('predict(np.ones((1, 64), np.float32))')\n{END}") == status
    assert program.do("predict(np.ones((1, 64), np.float32))").shape == (1, 64)
    assert host.copies_of_weights() == 1


def test_a_forked_child_may_hang(start: Start, host: Host, path: Path) -> None:
    host.switch(fork="hang")
    program = start()
    program.do("build(path)", path=path)
    program.do(FORK, path=path)
    child = program.do("child('build(path)')")
    program.begin("os.waitpid(child_pid, 0)[1]", child_pid=child)
    assert not program.has_answered(0.1)
    os.kill(child, signal.SIGKILL)
    assert program.result() == signal.SIGKILL


def test_a_fork_before_the_first_use_is_fine(start: Start, path: Path) -> None:
    program = start()
    program.do(FORK, path=path)
    program.do("pid()")
    assert program.do(f"pid_of_child = child('build(path)')\n{END.replace('pid,', 'pid_of_child,')}") == 0


def test_a_forked_child_does_not_keep_its_parent_alive(start: Start, host: Host, path: Path) -> None:
    program = start()
    program.do("build(path)", path=path)
    program.do(FORK)
    child = program.do("child('import time; time.sleep(60)')")
    program.kill()
    assert host.ledger().used == 0
    os.kill(child, signal.SIGKILL)


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
def test_a_switch_that_does_not_exist_is_an_error(host: Host, name: str, arguments: Any, options: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        getattr(host, name)(*arguments, **options)


def test_many_processes_change_the_ledger_at_once(start: Start, host: Host, path: Path) -> None:
    programs = [start() for _ in range(8)]
    for program in programs:
        program.begin("for _ in range(5): build(path); lib.model = None\nbuild(path)", path=path)
    for program in programs:
        program.result()
    assert host.copies_of_weights() == 8
    assert host.count("build") == 8 * 6
