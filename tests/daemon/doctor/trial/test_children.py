"""The self-test's children, played by programs that misbehave."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from weightd.daemon.children.launch import Program
from weightd.daemon.doctor.trial.children import Children, Confused, Died, Hung, Refused
from weightd.protocol.codec import encode
from weightd.protocol.messages.children import Broken, Built, Hello, Stop, Traits

HELLO = Hello("4711", "5" * 64, {}, Traits(False, False, False))

# What each program begins with: `say` sends a frame to the daemon.
PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
import zmq
from weightd.protocol.codec import encode
from weightd.protocol.messages.children import (Broken, Hello, Traits)
def argument(name): return sys.argv[sys.argv.index(name) + 1]
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, argument("--name").encode())
socket.connect(argument("--address"))
def say(message): socket.send(message if isinstance(message, bytes) else encode(message))
"""


@pytest.fixture
def limit() -> float:
    return 20.0


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(str(tmp_path / "python"), "mindspore_lite", str(tmp_path / "model"), "ascend:0")


@pytest.fixture
def children(program: Program, limit: float) -> Iterator[Children]:
    with Children(program, limit) as children:
        yield children


def play(program: Program, code: str) -> None:
    """Let the children run this code."""
    script = Path(program.python)
    script.with_suffix(".py").write_text(PROGRAM.format(path=sys.path) + code)
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {script}.py "$@"\n')
    script.chmod(0o700)


def test_a_message_and_the_next(children: Children, program: Program) -> None:
    play(program, "say(Hello('4711', '5' * 64, {}, Traits(False, False, False))); say(Broken('no')); time.sleep(99)")
    children.start("holder")
    assert children.hear("holder", Hello, "start")[0] == HELLO
    with pytest.raises(Refused, match=r"^holder: build: no$"):
        children.hear("holder", Built, "build")


def test_the_last_words_of_one_that_dies_count(children: Children, program: Program, tmp_path: Path) -> None:
    play(program, "say(Broken('that is why')); zmq.Context.instance().destroy(linger=2000); sys.exit(70)")
    children.start("holder")
    while running(tmp_path):
        time.sleep(0.01)
    with pytest.raises(Refused, match="that is why"):
        children.hear("holder", Hello, "start")
    with pytest.raises(Died, match="exited with status 70"):
        children.hear("holder", Hello, "start")
    with pytest.raises(Died, match="it has ended before"):
        children.hear("holder", Hello, "start")
    children.order("holder", Stop())  # nobody is there, and nobody minds
    children.end("holder")


def test_the_log_of_one_that_dies_is_shown(children: Children, program: Program) -> None:
    play(program, "print('the cause', file=sys.stderr); import os; os.abort()")
    children.start("holder")
    with pytest.raises(Died, match=r"holder: start: killed by SIGABRT; its log ends: the cause"):
        children.hear("holder", Hello, "start")


def test_another_message_than_the_one_that_is_due(children: Children, program: Program) -> None:
    play(program, "say(Hello('4711', '5' * 64, {}, Traits(False, False, False))); time.sleep(99)")
    children.start("holder")
    with pytest.raises(Confused, match="expected Built, got Hello"):
        children.hear("holder", Built, "build")


def test_bytes_that_are_no_message(children: Children, program: Program) -> None:
    play(program, "say(b'rubbish'); time.sleep(99)")
    children.start("holder")
    with pytest.raises(Confused, match="it broke the protocol"):
        children.hear("holder", Hello, "start")


def test_one_that_cannot_be_started(children: Children) -> None:
    with pytest.raises(Died, match=r"cannot start .*No such file"):
        children.start("holder")


@pytest.mark.parametrize("limit", [1.0])
def test_one_that_says_nothing(children: Children, program: Program, limit: float) -> None:
    play(program, "time.sleep(99)")
    children.start("holder")
    with pytest.raises(Hung, match=f"no answer within {limit:g} s; its log is empty"):
        children.hear("holder", Hello, "start")


@pytest.mark.parametrize("limit", [1.0])
@pytest.mark.parametrize("name", ["holder", "nobody"])
def test_nobody_speaks_for_another(children: Children, program: Program, name: str) -> None:
    play(program, "time.sleep(99)")
    children.start("holder")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
        socket.connect(children.address)
        socket.send(encode(Broken("a lie")))
        with pytest.raises(Hung):
            children.hear("holder", Hello, "start")


def test_what_is_left_after_the_block(program: Program, tmp_path: Path) -> None:
    play(program, "say(Hello('4711', '5' * 64, {}, Traits(False, False, False))); time.sleep(99)")
    before = set(Path("/tmp").glob("weightd-doctor-*"))
    with Children(program, 20) as children:
        for name in ("one", "two"):
            children.start(name)
            children.hear(name, Hello, "start")
        assert len(running(tmp_path)) == 2
    assert running(tmp_path) == []
    assert set(Path("/tmp").glob("weightd-doctor-*")) == before
    assert children.survivors == []


def running(directory: Path) -> list[str]:
    lines: list[str] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = each.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        lines += [text] * (str(directory / "python") in text)
    return lines
