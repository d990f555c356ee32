"""Tests of the simulated libascendcl.so, called with ctypes."""

from __future__ import annotations

from typing import Any, Tuple

import pytest

from ascendsim import Host, driver
from ascendsim.program import Program

from .support import ATTACH, Start, assert_refused, share


@pytest.fixture
def shared(start: Start) -> Tuple[Program, Program, str]:
    """Return a holder, a listed worker, and the handle."""
    holder, (worker,), handle = share(start, attached=0)
    return holder, worker, handle


def test_pids_accumulate_up_to_a_limit(shared: Any, host: Host) -> None:
    holder, worker, handle = shared
    assert driver.MAX_PIDS == 65535
    holder.do("import ascendsim.driver\nascendsim.driver.MAX_PIDS = 3")
    assert holder.do("set_pids(handle, 7, 0, 8)", handle=handle) == 0
    listed = sorted([7, 8, worker.do("pid()")])
    assert host.card_state().weights.whitelist == listed
    assert holder.do("set_pids(handle, 9)") == 507899
    assert holder.do("set_pids(handle, 7)") == 507899  # Not even to renew it (v2).
    assert host.card_state().weights.whitelist == listed


def test_lists_process_only_after_its_start(shared: Any, host: Host, start: Start) -> None:
    holder, _, handle = shared
    holder.do("set_pids(handle, 555)", handle=handle)
    assert_refused(start(pid=555), handle)
    assert "Time check fail" in host.driver_log()[-1]
    again = start(pid=555)
    again.do("pid()")
    assert holder.do("set_pids(handle, 555)") == 0
    again.do(ATTACH, handle=handle)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("set_pids('5', 1)", 507899),
        ("set_pids('0', 1)", 507899),
        ("set_pids(handle, 0)", 107000),
        ("set_pids(handle)", 107000),
        ("f(int(handle), (ctypes.c_int32 * 1)(5), 1)", 507899),  # An int has 32 bits unless ctypes gets another type.
        ("f(ctypes.c_uint64(int(handle)), (ctypes.c_int32 * 1)(5), 1)", 0),
    ],
)
def test_arguments_of_set_pid_call(shared: Any, call: str, code: int) -> None:
    holder, _, handle = shared
    find = "f = ctypes.CDLL('libascendcl.so').aclrtMemSetPidToShareableHandle\n"
    assert holder.do(find + call, handle=handle) == code


def test_only_the_exporter_sets_pids(shared: Any, host: Host) -> None:
    _, worker, handle = shared
    assert worker.do("set_pids(handle, pid())", handle=handle) == 507899
    assert "EACCES" in host.driver_log()[-1]


def test_other_libraries_load_as_before(program: Program, host: Host) -> None:
    assert program.do("ctypes.CDLL(None).getpid() == os.getpid()")
    assert program.do("ctypes.cdll.LoadLibrary('libc.so.6').getpid() == os.getpid()")
    assert program.do("ctypes.cdll.LoadLibrary('/opt/acl/libascendcl.so').aclInit(None) == 0")
    assert program.refusal("ctypes.CDLL('libascendcl.so').aclrtNothing").kind == "AttributeError"
    assert program.refusal("ctypes.CDLL('libnothing.so')").kind == "OSError"
    bare = "p = ctypes.c_int32()\nctypes.CDLL('libascendcl.so').aclrtDeviceGetBareTgid(ctypes.byref(p))\np.value"
    assert program.do(bare) == program.do("pid()")
    host.switch(libascendcl=False)
    error = program.refusal("ctypes.CDLL('libascendcl.so')")
    assert (error.kind, error.text[:41]) == ("OSError", "libascendcl.so: cannot open shared object")
