"""Tests of the child processes of the doctor's self-test. Faulty scripts take the place of the worker program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from testkit.waiting import until
from weightd_daemon.doctor.selftest.processes import (
    ChildError,
    ChildExited,
    ChildRejected,
    ChildTimedOut,
    ProtocolViolation,
    SelfTestProcesses,
)
from weightd_daemon.processes.spec import WorkerProgram
from weightd_protocol.codec import encode
from weightd_protocol.messages.worker import (
    Built,
    Hello,
    ProcessFailed,
    Stop,
)
from weightd_protocol.messages.worker_common import SharingTraits

LIMIT_S = 20.0
HELLO = Hello("4711", "5" * 64, {}, SharingTraits(False, False, False))

# Common beginning of all scripts: `say` sends a frame to the doctor.
PROGRAM = f"""
import json, os, sys, time
sys.path[:0] = {sys.path!r}
import zmq
words = json.load(sys.stdin)
def argument(name): return words[words.index(name) + 1]
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, argument("--name").encode())
socket.connect(argument("--address"))
say = socket.send_multipart
hello, broken = {encode(HELLO)!r}, {encode(ProcessFailed("that is why"))!r}
"""

StartHolder = Callable[..., SelfTestProcesses]


@pytest.fixture
def program(tmp_path: Path) -> WorkerProgram:
    return WorkerProgram(str(tmp_path / "python"), "mindspore_lite", str(tmp_path / "model"), "ascend:0")


@pytest.fixture
def blocks() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_holder(program: WorkerProgram, blocks: ExitStack) -> StartHolder:
    """Return a function that starts a holder which runs the given code."""
    script = Path(program.python)

    def start(code: str, limit: float = LIMIT_S) -> SelfTestProcesses:
        script.with_suffix(".py").write_text(PROGRAM + code)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {script}.py "$@"\n')
        script.chmod(0o700)
        children = blocks.enter_context(SelfTestProcesses(program, limit))
        children.start("holder")
        return children

    return start


def count_running(program: WorkerProgram) -> int:
    lines: list[bytes] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(each.read_bytes())
        except OSError:
            continue
    return sum(program.python.encode() in line for line in lines)


def test_wait_for_returns_message_or_reports_failure(start_holder: StartHolder) -> None:
    children = start_holder("say(hello); say(broken); time.sleep(99)")
    assert children.wait_for("holder", Hello, "start")[0] == HELLO
    with pytest.raises(ChildRejected, match=r"^holder: build: that is why$"):
        children.wait_for("holder", Built, "build")


def test_reads_last_message_of_exited_child(start_holder: StartHolder, program: WorkerProgram) -> None:
    children = start_holder("say(broken); zmq.Context.instance().destroy(linger=2000); sys.exit(70)")
    until(lambda: not count_running(program), "it ends")
    for kind, text in (
        (ChildRejected, "that is why"),
        (ChildExited, "exited with status 70"),
        (ChildExited, "the process has already exited"),
    ):
        with pytest.raises(kind, match=text):
            children.wait_for("holder", Hello, "start")
    children.send_order("holder", Stop())  # no error, although the child has exited
    children.kill("holder")


@pytest.mark.parametrize(
    ("code", "limit", "kind", "text"),
    [
        (
            "print('the cause', file=sys.stderr); os.abort()",
            LIMIT_S,
            ChildExited,
            "killed by SIGABRT; its log ends: the cause",
        ),
        ("say(hello); time.sleep(99)", LIMIT_S, ProtocolViolation, "expected Built, got Hello"),
        ("say([b'rubbish']); time.sleep(99)", LIMIT_S, ProtocolViolation, "protocol error"),
        ("time.sleep(99)", 1.0, ChildTimedOut, "no answer within 1 s; its log is empty"),
    ],
)
def test_reports_failure_of_child(
    start_holder: StartHolder, code: str, limit: float, kind: type[ChildError], text: str
) -> None:
    with pytest.raises(kind, match=f"holder: build: .*{text}"):
        start_holder(code, limit).wait_for("holder", Built, "build")


def test_missing_program_is_reported(program: WorkerProgram) -> None:
    with (
        SelfTestProcesses(program, LIMIT_S) as children,
        pytest.raises(ChildExited, match=r"cannot start .*No such file"),
    ):
        children.start("holder")


@pytest.mark.parametrize("name", ["holder", "nobody"])
def test_ignores_messages_from_other_processes(start_holder: StartHolder, name: str) -> None:
    children = start_holder("time.sleep(99)", 1.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
        socket.connect(children.address)
        socket.send_multipart(encode(ProcessFailed("a lie")))
        with pytest.raises(ChildTimedOut):
            children.wait_for("holder", Hello, "start")


def test_exit_kills_children_and_removes_files(
    start_holder: StartHolder, program: WorkerProgram, blocks: ExitStack
) -> None:
    before = set(Path("/tmp").glob("weightd-doctor-*"))
    children = start_holder("say(hello); time.sleep(99)")
    children.start("other")
    for name in ("holder", "other"):
        children.wait_for(name, Hello, "start")
    assert count_running(program) == 2
    blocks.close()
    assert count_running(program) == 0
    assert set(Path("/tmp").glob("weightd-doctor-*")) == before
    assert children.survivors == []
