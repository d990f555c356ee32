"""The list of a service's processes, for all ways in which they start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from testkit import census, models
from testkit.managed import ManagedService
from testkit.waiting import until

# A process with a running child, and with a child that has exited but is not reaped.
_PARENT = """
import os, sys
if not os.fork():
    sys.exit(sys.stdin.read())
if not os.fork():
    os._exit(0)
os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
print(flush=True)
sys.stdin.read()
"""


def test_finds_children_except_exited_ones() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=pipe, stdout=pipe, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [first, child] = census.families([parent.pid])
        assert (first, census.families([child])) == (parent.pid, [child])
        parent.communicate()


def test_finds_same_roles_after_restart_of_daemon(tmp_path: Path) -> None:
    with ManagedService({"tiny": {"path": models.tiny(tmp_path / "tiny.onnx")}}) as service:
        service.ready()
        until(lambda: "proxy" in service.roles().values(), "the ZeroMQ proxy runs")
        before = service.roles()
        assert {"daemon", "shim", "zygote", "fork server", "worker"} <= {*before.values()}
        assert "other" not in before.values()
        assert service.pss_at_rest(0.5).keys() == before.keys()
        service.restart(signal.SIGKILL)
        service.ready()
        until(lambda: sorted(service.roles().values()) == sorted(before.values()), "the same number of processes runs")
        after = service.roles()
        kept = ("shim", "worker")
        assert {pid for pid, role in after.items() if role in kept} == {p for p, role in before.items() if role in kept}
