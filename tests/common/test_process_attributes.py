"""Tests of a process's OOM score and of its command line in ps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from weightd_common.process_attributes import raise_score

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
