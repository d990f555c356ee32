from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.platform.resource_limits import ResourceShortage, check_threads, find_shortage, with_limit_hint

# Messages that engines and Python print under a limit.
ONNXRUNTIME = (
    "onnxruntime: env.cc:327 PosixThread(const char*, int, unsigned int (*)(int), const onnxruntime::ThreadOptions&) "
    "pthread_create failed, error code: 11 error msg: Resource temporarily unavailable | "
)
OPENBLAS = "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 4: Resource temporarily unavailable"
SNAPSHOT = "thread.start() | _start_new_thread(self._bootstrap, ()) | RuntimeError: can't start new thread"
SUBPROCESS = "self.pid = _fork_exec( | ^^^ | BlockingIOError: [Errno 11] Resource temporarily unavailable"
TERMINATED = (
    "terminate called after throwing an instance of 'std::system_error' | what(): Resource temporarily unavailable"
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (SNAPSHOT, ResourceShortage.TASKS),
        (ONNXRUNTIME, ResourceShortage.TASKS),
        (OPENBLAS, ResourceShortage.TASKS),
        (SUBPROCESS, ResourceShortage.TASKS),
        (TERMINATED, ResourceShortage.TASKS),
        ("Resource temporarily unavailable (src/thread.cpp:241) | Fatal Python error: Aborted", ResourceShortage.TASKS),
        ("cannot be started by a fork: cannot fork: Resource temporarily unavailable", ResourceShortage.TASKS),
        ("cannot start /usr/bin/python3: Resource temporarily unavailable", ResourceShortage.TASKS),
        ("its fork server cannot be started: Resource temporarily unavailable", ResourceShortage.TASKS),
        ("cannot take a snapshot: [Errno 11] Resource temporarily unavailable", ResourceShortage.TASKS),
        ("cannot start /usr/bin/python3: Cannot allocate memory", ResourceShortage.MEMORY),
        ("terminate called after throwing an instance of 'std::bad_alloc'", ResourceShortage.MEMORY),
        ("data = file.read() | MemoryError", ResourceShortage.MEMORY),
        ("cannot copy /m.onnx to /cache: Too many open files", ResourceShortage.FILES),
        ("cannot start /usr/bin/python3: Too many open files in system", ResourceShortage.HOST_FILES),
        # Unrelated messages.
        ("", None),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", None),
        ("connection.recv(1) | BlockingIOError: [Errno 11] Resource temporarily unavailable", None),
        ("cannot copy /m.onnx to /cache: No space left on device", None),
        ("No module named 'numpy'", None),
    ],
)
def test_finds_the_exhausted_resource(text: str, what: ResourceShortage | None) -> None:
    assert find_shortage(text) is what


@given(st.text())
def test_other_text_is_unchanged(text: str) -> None:
    assert find_shortage(text) is not None or with_limit_hint(text) == text


def host(directory: Path, group: str) -> Path:
    """A host whose control group "a" allows 64 processes and threads."""
    directory.joinpath("cgroup").write_text(f"0::/{group}\n")
    mount = directory / "hierarchy"
    directory.joinpath("mountinfo").write_text(f"30 23 0:26 / {mount} rw shared:9 - cgroup2 cgroup2 rw\n")
    (mount / "a").mkdir(parents=True)
    (mount / "a" / "pids.max").write_text("64\n")
    (mount / "a" / "pids.current").write_text("60\n")
    return directory


@pytest.fixture(params=[True, False], ids=["limited", "unlimited"])
def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether this process has resource limits; each limit is its number plus 1000."""

    def limit(number: int) -> tuple[int, int]:
        return (1000 + number if request.param else resource.RLIM_INFINITY), resource.RLIM_INFINITY

    monkeypatch.setattr("weightd_daemon.platform.resource_limits.resource.getrlimit", limit)
    is_limited: bool = request.param
    return is_limited


@pytest.mark.parametrize("group", ["a", "b"])
def test_names_the_limit_and_the_setting_to_raise(tmp_path: Path, limited: bool, group: str) -> None:
    proc = host(tmp_path, group)
    found = {what: with_limit_hint(text, proc) for what, text in [
        ("tasks", SNAPSHOT), ("files", "Too many open files"), ("memory", "MemoryError"),
    ]}  # fmt: skip
    assert found["tasks"].startswith(
        "cannot start a process or thread: the limit of processes and threads is reached ("
    )
    assert found["tasks"].endswith(f"; original error: {SNAPSHOT}")
    assert ("RLIMIT_NPROC 1006" in found["tasks"], "ulimit -u" in found["tasks"]) == (limited, limited)
    is_in_group = group == "a"
    assert (f"pids.max 64 of {tmp_path}/hierarchy/a, 60 in use" in found["tasks"]) is is_in_group
    assert ("TasksMax=" in found["tasks"]) is is_in_group
    assert ("kernel.threads-max" in found["tasks"]) is not (limited or is_in_group)
    assert ("RLIMIT_NOFILE 1007" in found["files"]) is limited
    assert ("RLIMIT_AS 1009" in found["memory"]) is limited


# Becomes another user, since RLIMIT_NPROC does not apply to root. The imports come first, since packages may be
# readable by root only.
_UNDER_A_LIMIT = """
import os, resource, sys, time
sys.path[:] = {path!r}
from weightd_daemon.platform.resource_limits import check_threads
from weightd_daemon.platform.directories import PathInUse
def check(count):
    # Exited threads count until the kernel has removed them.
    while len(os.listdir("/proc/self/task")) > 1:
        time.sleep(0.001)
    check_threads(count)
check(2)
check(0)
os.setgroups([])
os.setresgid(61234, 61234, 61234)
os.setresuid(61234, 61234, 61234)
resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))
check(1)
try:
    check(2)
except PathInUse as error:
    print(error)
check(1)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_check_threads_fails_under_a_limit() -> None:
    program = _UNDER_A_LIMIT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RLIMIT_NPROC 2" in done.stdout


def test_check_threads_passes_without_a_limit() -> None:
    check_threads(2)
