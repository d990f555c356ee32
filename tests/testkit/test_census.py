"""Every process of a service is found, however it came to be."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from testkit import census, models
from testkit.managed import ManagedService
from testkit.waiting import until

# A child that goes on, and one that has exited and is not reaped.
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


def test_processes_are_found_with_their_children_but_none_that_has_exited() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=pipe, stdout=pipe, start_new_session=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [first, child] = census.families([parent.pid])
        assert (first, census.families([child])) == (parent.pid, [child])
        parent.communicate()


def test_a_service_has_the_same_processes_under_another_daemon(tmp_path: Path) -> None:
    with ManagedService({"tiny": {"path": models.tiny(tmp_path / "tiny.onnx")}}) as service:
        service.ready()
        until(lambda: "proxy" in service.roles().values(), "there is a ZeroMQ proxy")
        before = service.roles()
        assert {"daemon", "shim", "zygote", "fork server", "worker"} <= {*before.values()}
        assert "other" not in before.values()
        assert service.pss_at_rest(0.5).keys() == before.keys()
        service.restart(signal.SIGKILL)
        service.ready()
        until(lambda: sorted(service.roles().values()) == sorted(before.values()), "there are as many")
        after = service.roles()
        kept = ("shim", "worker")
        assert {pid for pid, role in after.items() if role in kept} == {p for p, role in before.items() if role in kept}
