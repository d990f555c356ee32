"""The simulated libascendcl.so, by ctypes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Tuple

import pytest

from ascendsim import Host, driver, environment, ledger, models
from ascendsim.program import Program

Start = Callable[..., Program]

MIB = 1024 * 1024
PROBE = """
import ctypes
acl = ctypes.CDLL("libascendcl.so")
free, total, cards = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint32()
assert acl.aclInit(None) == 0
assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 107002
assert acl.aclrtGetDeviceCount(ctypes.byref(cards)) == 0
assert acl.aclrtSetDevice(cards.value) != 0
assert acl.aclrtSetDevice(0) == 0
assert acl.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
acl.aclrtGetSocName.restype = ctypes.c_char_p
print(cards.value, free.value, total.value, acl.aclrtGetSocName().decode())
assert acl.aclrtGetMemInfo(0, ctypes.byref(free), ctypes.byref(total)) == 0
assert (free.value, total.value) == (0, 0)
assert acl.aclInit(None) == 100002
assert acl.aclrtResetDevice(0) == 0 and acl.aclFinalize() == 0
"""


@pytest.fixture
def shared(start: Start, path: Path) -> Tuple[Program, Program, str]:
    """A holder whose list has nobody, a worker, and the handle."""
    holder, worker = start(), start()
    handle: str = holder.do("build(path, pids='1')", path=path)
    return holder, worker, handle


def attach(worker: Program, path: Path, handle: str) -> str:
    answer: str = worker.do("build(path, handle=handle)", path=path, handle=handle)
    return answer


def test_a_probe_reads_the_memory_without_the_library(start: Start, host: Host, tmp_path: Path) -> None:
    host.switch(capacity_mib=1000, context_mib=100, workspace_mib=50, soc_name="Ascend310P3")
    start().do("build(path, pids='1')", path=models.mlp(tmp_path / "m.mindir", size_mib=99))
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env={**os.environ, **environment(host)}, stdout=subprocess.PIPE, check=True)
    free = 1000 - (100 + 100 + 50) - 100
    assert done.stdout.decode() == f"2 {free * MIB} {1000 * MIB} Ascend310P3\n"
    assert len(host.ledger().processes) == 1


def test_pids_add_up(shared: Any, host: Host, path: Path) -> None:
    holder, worker, handle = shared
    pid = worker.do("pid()")
    assert holder.do("set_pids(handle, 77)", handle=handle) == 0
    assert holder.do("set_pids(handle, pid_, 0)", handle=handle, pid_=pid) == 0
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert set(weights.whitelist) == {1, 77, pid}
    assert attach(worker, path, handle) == ""


def test_a_respawned_process_is_listed_anew(start: Start, shared: Any, path: Path) -> None:
    holder, _, handle = shared
    holder.do("set_pids(handle, 555)", handle=handle)
    worker = start(pid=555)
    assert worker.refusal("build(path, handle=handle)", path=path, handle=handle).kind == "RuntimeError"
    again = start(pid=555)
    again.do("pid()")
    assert holder.do("set_pids(handle, 555)", handle=handle) == 0
    attach(again, path, handle)


def test_only_the_exporter_sets_pids(shared: Any, host: Host) -> None:
    _, worker, handle = shared
    assert worker.do("set_pids(handle, pid())", handle=handle) == 507899
    assert "EACCES" in host.driver_log()[-1]


def test_wrong_arguments(shared: Any) -> None:
    holder, _, handle = shared
    assert holder.do("set_pids('5', 1)") == 507899
    assert holder.do("set_pids('0', 1)") == 507899
    assert holder.do("set_pids(handle, 0)", handle=handle) == 107000
    assert holder.do("set_pids(handle)", handle=handle) == 107000


def test_a_handle_that_is_no_c_uint64_is_cut(shared: Any) -> None:
    holder, _, handle = shared
    code = (
        "f = ctypes.CDLL('libascendcl.so').aclrtMemSetPidToShareableHandle\nf(int(handle), (ctypes.c_int32 * 1)(5), 1)"
    )
    assert holder.do(code, handle=handle) == 507899
    assert (
        holder.do(code.replace("f(", "f.argtypes = [ctypes.c_uint64] + [ctypes.c_void_p, ctypes.c_size_t]\nf(", 1)) == 0
    )


def test_a_list_has_an_end(shared: Any, host: Host) -> None:
    holder, _, handle = shared
    assert driver.MAX_PIDS == 65535
    holder.do("import ascendsim.driver\nascendsim.driver.MAX_PIDS = 10")
    assert holder.do("set_pids(handle, *range(1, 11))", handle=handle) == 0
    assert holder.do("set_pids(handle, 70000)", handle=handle) == 507899
    assert holder.do("set_pids(handle, 5)", handle=handle) == 507899  # not even to renew it (v2)
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert len(weights.whitelist) == 10


def test_the_call_may_be_missing_or_unsupported(shared: Any, host: Host, start: Start, path: Path) -> None:
    holder, _, handle = shared
    host.switch(acl_set_pid="unsupported")
    assert holder.do("set_pids(handle, 1)", handle=handle) == 207000
    assert start().refusal("build(path, pids='1')", path=path).kind == "RuntimeError"
    host.switch(acl_set_pid="missing")
    error = holder.refusal("set_pids(handle, 1)", handle=handle)
    assert (error.kind, error.text) == (
        "AttributeError",
        "libascendcl.so: undefined symbol: aclrtMemSetPidToShareableHandle",
    )
    assert start().do("build(path, pids='1')", path=path)  # the library links it otherwise


def test_the_library_may_be_missing(host: Host, any_program: Program) -> None:
    host.switch(libascendcl=False)
    error = any_program.refusal("ctypes.CDLL('libascendcl.so')")
    assert error.kind == "OSError"
    assert error.text.startswith("libascendcl.so: cannot open shared object file")


def test_everything_else_is_loaded_as_before(any_program: Program) -> None:
    assert any_program.do("ctypes.CDLL(None).getpid() == os.getpid()")
    assert any_program.do("ctypes.cdll.LoadLibrary('libc.so.6').getpid() == os.getpid()")
    assert any_program.do("ctypes.cdll.LoadLibrary('/opt/acl/libascendcl.so').aclFinalize() == 0")
    assert any_program.refusal("ctypes.CDLL('libascendcl.so').aclrtNothing").kind == "AttributeError"
    assert any_program.refusal("ctypes.CDLL('libnothing.so')").kind == "OSError"
    bare = (
        "p = ctypes.c_int32()\nctypes.CDLL('libascendcl.so').aclrtDeviceGetBareTgid(ctypes.byref(p))\np.value == pid()"
    )
    assert any_program.do(bare)


@pytest.fixture
def any_program(start: Start) -> Program:
    return start()
