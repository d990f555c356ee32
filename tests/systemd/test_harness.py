"""The test harness: a private, clean system that disappears however the tests end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import mindir
from testkit.waiting import until

from . import boot_alone, image
from .manager import SCRATCH_PREFIX, Manager

pytestmark = pytest.mark.e2e


def traces(pid: int) -> list[str]:
    """Return cgroups and files that remain of the manager booted by `boot_alone` with this pid."""
    name = f"{SCRATCH_PREFIX}{pid}-"
    # os.walk, unlike rglob, tolerates directories that disappear meanwhile.
    groups = [each for _, directories, _ in os.walk("/sys/fs/cgroup") for each in directories]
    scratch = [each.name for each in (mindir.REPOSITORY / "build").iterdir()]
    return [each for each in (*groups, *scratch) if each.startswith(name)]


@pytest.fixture
def other(bare_manager: Manager) -> Iterator[subprocess.Popen[str]]:
    """A process that has booted another manager and waits."""
    assert bare_manager.pid, "systemd can boot here"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", boot_alone.__name__]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=mindir.REPOSITORY)
    assert process.stdout
    assert process.stdout.readline().strip() == "booted"
    assert traces(process.pid)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_removes_everything_when_owner_is_killed(other: subprocess.Popen[str], number: signal.Signals) -> None:
    other.send_signal(number)
    other.wait(60)
    until(lambda: not traces(other.pid), "all cgroups and files are removed", 60)


def test_manager_is_isolated(bare_manager: Manager) -> None:
    assert "systemd" in bare_manager.proc(1, "cmdline")
    assert bare_manager.run(["ls", "/sys/class/net"]).split() == ["lo"]
    assert bare_manager.systemctl("is-system-running").strip() == "running"
    bare_manager.write("/usr/lib/weightd-was-here", "inside")
    assert bare_manager.run(["cat", "/usr/lib/weightd-was-here"]) == "inside"
    assert not Path("/usr/lib/weightd-was-here").exists()


def test_cgroups_have_no_process_of_host(bare_manager: Manager) -> None:
    groups = (bare_manager.root / "sys/fs/cgroup").rglob("cgroup.procs")
    members = {int(each) for group in groups for each in group.read_text("ascii").split()}
    assert bare_manager.pid in members
    # Process 1 of a namespace is a child of the process that created the namespace.
    members.remove(int(Path(f"/proc/{bare_manager.pid}/stat").read_text("ascii").split()[3]))
    outside = Path("/proc/self/ns/pid").readlink()
    assert outside not in {Path(f"/proc/{pid}/ns/pid").readlink() for pid in members}


def test_refuses_to_boot_in_cgroup_of_host(tmp_path: Path) -> None:
    (tmp_path / "cgroups").write_text("", "utf-8")
    (tmp_path / "name").write_text(tmp_path.name, "utf-8")
    boot = Path(image.__file__).with_name("boot.sh")
    done = subprocess.run(["sh", boot, "enter", tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "in a cgroup that is not its own" in done.stderr
