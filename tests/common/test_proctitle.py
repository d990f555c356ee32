"""What ps shows of a process that has changed its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import List

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "AFTER": "all that"}

# Writes two of them, and prints the last one; its environment is as it was.
SCRIPT = """
import gc, os, sys
from pathlib import Path
from weightd_common import proctitle
proctitle._PR_SET_MM = int(sys.argv[1])
shown = proctitle.ProcessTitle()
first = shown.first_word
assert first == sys.executable
shown.set_title([first, "a" * 9000, "", "end"])
gc.collect()
# As in a process that is forked of one that has written its own.
again = proctitle.ProcessTitle()
assert again.first_word == first
again.set_title([first, *sys.argv[2:]])
assert b"AFTER=all that" in Path("/proc/self/environ").read_bytes().split(b"\\0")
print(Path("/proc/self/cmdline").read_text(), end="")
"""


def shown(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=30, check=True).stdout.decode()


@pytest.mark.parametrize("words", [["-m", "weightd"], ["-m", "", "x" * 9000, "é"]])
def test_the_words_are_what_is_shown(words: List[str]) -> None:
    assert shown("35", *words) == "".join(f"{word}\0" for word in [sys.executable, *words])


def test_where_the_kernel_forbids_it_the_end_is_cut_off() -> None:
    room = sum(len(word) + 1 for word in [sys.executable, "-c", SCRIPT, "999", "weightd"])
    assert shown("999", "weightd").rstrip("\0") == f"{sys.executable}\0weightd"
    assert len(shown("999", "weightd")) == room
