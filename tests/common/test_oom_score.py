"""Workers go before their holder, and that before the daemon."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightd_common.oom_score import raise_score

# Raises its own score first, as OOMScoreAdjust= of a unit does, then starts the child.
PARENT = """
import subprocess, sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("300")
child = '''
from weightd_common.oom_score import raise_score
raise_score("worker")
print(int(open("/proc/self/oom_score_adj").read()))
'''
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_a_child_s_score_is_above_that_of_its_parent() -> None:
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
def test_the_score_is_raised_up_to_the_largest(tmp_path: Path, before: str, role: str, after: str) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(before)
    raise_score(role, file)
    assert file.read_text() == after


def test_one_that_was_forked_is_as_far_above_the_daemon_as_any_other(tmp_path: Path) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text("300\n")
    raise_score("worker", file, daemon_score=100)
    assert file.read_text() == "500\n"


def test_where_that_fails_the_process_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strange = tmp_path / "strange"
    strange.write_text("high")
    with caplog.at_level(logging.DEBUG, "weightd.protocol"):
        raise_score("worker", tmp_path / "missing")
        raise_score("worker", strange)
    assert [each.levelname for each in caplog.records] == ["DEBUG", "DEBUG"]
    assert strange.read_text() == "high"
