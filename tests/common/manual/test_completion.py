from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Callable, List

import pytest

from weightd_common.manual.commands import read_parser
from weightd_common.manual.completion import DIRECTORY, FILE, MODEL, bash_script

Complete = Callable[..., List[str]]

# What bash does at a tab: the last word is the one that is completed.
_PRESS = """
set -u
source script
COMP_LINE="$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_thing
printf '%s\\n' "${COMPREPLY[@]}"
"""

# What is asked for the names of models.
_THING = """#!/bin/sh
case "$*" in ('status --timeout 1'|'status --timeout 1 --socket=ipc:///x') ;; (*) exit 1 ;; esac
cat <<END
weightd 1: running, pid 7
resnet: SERVING, onnxruntime, /x
  note: NO, x
un-et: FAILED, x
ascend:0: 1 MB of 2 MB
END
"""


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    parser = argparse.ArgumentParser(prog="thing")
    parser.add_argument("--socket", metavar="ADDRESS")
    commands = parser.add_subparsers()
    show = commands.add_parser("show", help="x")
    show.add_argument("model", metavar="MODEL")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--mode", choices=["fast", "slow"])
    show.add_argument("--out", metavar="DIR")
    commands.add_parser("shut", help="x").add_argument("what", choices=["door", "window"])
    (tmp_path / "script").write_text(bash_script(read_parser(parser), {"MODEL": MODEL, "PATH": FILE, "DIR": DIRECTORY}))
    (tmp_path / "a file").write_text("")
    (tmp_path / "a dir").mkdir()
    (tmp_path / "thing").write_text(_THING)
    (tmp_path / "thing").chmod(0o755)

    def press(*words: str, line: str = "") -> List[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", _PRESS, "bash", line or " ".join(words), "thing", *words],
            cwd=str(tmp_path),
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            timeout=30,
            check=False,
        )
        # Nothing may be printed into the line that somebody types.
        assert done.stderr == b""
        return sorted(done.stdout.decode().split("\n")[:-1])

    return press


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], ["show", "shut"]),
        (["sho"], ["show"]),
        (["-"], ["--help", "--socket", "-h"]),
        (["show", "--"], ["--help", "--mode", "--out"]),
        (["nonsense", ""], [""]),
        (["show", "--mode", ""], ["fast", "slow"]),
        (["show", "--mode", "=", "s"], ["slow"]),
        (["show", "--mode", "="], ["fast", "slow"]),
        (["shut", "w"], ["window"]),
        (["show", "resnet", "a"], ["a dir", "a file"]),
        (["show", "--mode", "fast", "resnet", "a"], ["a dir", "a file"]),
        (["show", "resnet", "--out", "a"], ["a dir"]),
        (["show", "resnet", "x", "a"], [""]),
        # Names of models are asked for.
        (["show", ""], ["resnet", "un-et"]),
        (["show", "re"], ["resnet"]),
    ],
)
def test_what_is_offered(complete: Complete, words: List[str], offered: List[str]) -> None:
    assert complete(*words) == offered


@pytest.mark.parametrize("option", ["--socket ipc:///x", "--socket=ipc:///x"])
def test_an_address_is_no_argument_and_is_where_the_names_are_asked_for(complete: Complete, option: str) -> None:
    # As bash takes it apart.
    words = option.replace(":", " : ").replace("=", " = ").split()
    assert complete(*words, "sho") == ["show"]
    assert complete(*words) == [""]
    assert complete(*words, "show", "", line=f"thing {option} show ") == ["resnet", "un-et"]
    assert complete(*words, "show", "", line=f"thing {option}wrong show ") == [""]
