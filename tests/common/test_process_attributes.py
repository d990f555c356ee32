"""Tests of a process's OOM score, its CPU priority and its command line in ps."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from weightd_common import process_attributes
from weightd_common.process_attributes import enter_load_priority, leave_load_priority, raise_score

# Raises its score first, as OOMScoreAdjust= of a unit does, then starts the child.
PARENT = """
import subprocess, sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("300")
child = '''
from weightd_common.process_attributes import raise_score
raise_score("worker")
print(int(open("/proc/self/oom_score_adj").read()))
'''
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_score_of_child_is_above_its_parent() -> None:
    if int(Path("/proc/self/oom_score_adj").read_text("ascii")) > 300:
        pytest.skip("this process has a higher score already, and may not lower it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=60, check=True)
    assert int(done.stdout) == 700


@pytest.mark.parametrize(
    ("before", "role", "after"),
    [
        ("0\n", "holder", "200\n"),
        ("0\n", "worker", "400\n"),
        ("-900\n", "worker", "-500\n"),
        ("600", "worker", "1000\n"),
        ("1000\n", "holder", "1000\n"),
    ],
)
def test_raises_score_up_to_the_maximum(tmp_path: Path, before: str, role: str, after: str) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(before)
    raise_score(role, file)
    assert file.read_text() == after


def test_raises_score_relative_to_daemon(tmp_path: Path) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text("300\n")
    raise_score("worker", file, daemon_score=100)
    assert file.read_text() == "500\n"


def test_continues_if_score_cannot_be_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strange = tmp_path / "strange"
    strange.write_text("high")
    with caplog.at_level(logging.DEBUG, "weightd.protocol"):
        raise_score("worker", tmp_path / "missing")
        raise_score("worker", strange)
    assert [each.levelname for each in caplog.records] == ["DEBUG", "DEBUG"]
    assert strange.read_text() == "high"


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "AFTER": "all that"}

# Sets two command lines and prints the last one; checks that the environment is unchanged.
SCRIPT = """
import gc, os, sys
from pathlib import Path
from weightd_common import process_attributes
process_attributes._PR_SET_MM = int(sys.argv[1])
shown = process_attributes.ProcessTitle()
first = shown.first_word
assert first == sys.executable
shown.set_title([first, "a" * 9000, "", "end"])
gc.collect()
# As in a process that is forked of one that has written its own.
again = process_attributes.ProcessTitle()
assert again.first_word == first
again.set_title([first, *sys.argv[2:]])
assert b"AFTER=all that" in Path("/proc/self/environ").read_bytes().split(b"\\0")
print(Path("/proc/self/cmdline").read_text(), end="")
"""


def shown(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=30, check=True).stdout.decode()


@pytest.mark.parametrize("words", [["-m", "weightd"], ["-m", "", "x" * 9000, "é"]])
def test_sets_command_line(words: List[str]) -> None:
    assert shown("35", *words) == "".join(f"{word}\0" for word in [sys.executable, *words])


def test_truncates_command_line_if_kernel_forbids_more() -> None:
    room = sum(len(word) + 1 for word in [sys.executable, "-c", SCRIPT, "999", "weightd"])
    assert shown("999", "weightd").rstrip("\0") == f"{sys.executable}\0weightd"
    assert len(shown("999", "weightd")) == room


# --- CPU priority ---------------------------------------------------------------------------------------------------

PRIORITIES = """
import os, resource, sys, threading
from weightd_common.process_attributes import *
before, (_, hard) = current_nice(), resource.getrlimit(resource.RLIMIT_NICE)
allow_load_priority()
enter_load_priority(before)
nices, go, end = [current_nice()], threading.Event(), threading.Event()
def later():
    nices.append(current_nice())
    go.set()
    end.wait()
    nices.append(current_nice())
thread = threading.Thread(target=later)
thread.start()
go.wait()
leave_load_priority(before)
end.set()
thread.join()
print(*[each - before for each in [*nices, current_nice()]], resource.getrlimit(resource.RLIMIT_NICE)[0] + before)
"""


def test_priority_is_low_only_during_a_load() -> None:
    """Threads of the engine that start during the load serve requests later, so their priority returns as well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PRIORITIES], stdout=subprocess.PIPE, env=environment, timeout=60, check=True
    )
    *nices, limit = map(int, done.stdout.split())
    # Only a privileged process, or one whose service manager allows it, may return to its priority.
    assert nices == ([0] * 4 if limit < 20 and os.geteuid() else [7, 7, 0, 0])


@pytest.mark.parametrize(
    ("limit", "capabilities", "daemon_nice", "nices"),
    [
        (20, 0, 0, [7]),
        (resource.RLIM_INFINITY, 0, 0, [7]),
        (19, 0, 0, []),
        (0, ~(1 << 23) & 0x1FFFFFFFFFF, 0, []),
        (0, 1 << 23, 0, [7]),
        (15, 0, 5, [12]),
        (20, 0, -5, []),
        (25, 0, -5, [2]),
    ],
)
def test_priority_is_lowered_only_if_it_can_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capabilities: int, daemon_nice: int, nices: List[int]
) -> None:
    done: List[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (tmp_path / "status").write_text(f"CapPrm:\t000001ffffffffff\nCapEff:\t{capabilities:016x}\n")
    monkeypatch.setattr(process_attributes, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(os, "setpriority", lambda _, thread, nice: done.append(nice))
    enter_load_priority(daemon_nice)
    assert done == nices


def test_priority_that_cannot_be_set_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    leave_load_priority(0)
