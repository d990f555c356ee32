"""One real use of each message type and of each command of weightd and weightctl.

A message type or command without a row in these tables fails a test. Other tests cover the details.
"""

from __future__ import annotations

import ast
import contextlib
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import zmq
from tools.manual.commands import read_parser

from testkit import models
from testkit.service import Service
from weightctl.cli import parser as ctl_parser
from weightd_common.endpoints import unix_path
from weightd_common.stream import Stream
from weightd_daemon.cli import parser
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import FrameReader
from weightd_protocol.messages.channels import (
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    OpenChannel,
    RequestAdopted,
    RequestLost,
)
from weightd_protocol.messages.control import (
    PROMOTE,
    Load,
    LoadResponse,
    ModelMetadata,
    ModelMetadataResponse,
    ModelReady,
    ReadyResponse,
    Reload,
    ReloadResponse,
    Rollout,
    RolloutResponse,
    ServerMetadata,
    ServerMetadataResponse,
    ServerReady,
    Unload,
    Update,
    UpdateResponse,
)
from weightd_protocol.messages.events import Events, EventsResponse, Logs, LogsResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer, InferResponse, RequestDescription, TensorSpec
from weightd_protocol.messages.metrics import Metrics, MetricsResponse
from weightd_protocol.messages.regions import Register, Registered, Released, Unregister
from weightd_protocol.messages.status import Status, StatusResponse
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT, ClientMessage, DaemonMessage
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD

from .support import LIMIT_S

pytestmark = pytest.mark.e2e

# Tests in which a real session receives each message of the daemon, as a worker or as a rank.
WORKER = Path(__file__).parents[1] / "worker"
SESSIONS = (
    WORKER / "test_session.py",
    WORKER / "ranks" / "test_rank.py",
    WORKER / "channels" / "test_direct.py",
    WORKER / "channels" / "test_weight_guard.py",
    WORKER.parent / "support/testkit/channels.py",
    WORKER.parent / "support/testkit/script.py",
)

MODEL = "tiny"
X = TensorSpec("x", "FP32", (1, 64))
ROW = bytes(X.nbytes)

# Messages to send, type of the answer, and words in it.
MESSAGES: Sequence[tuple[Sequence[ClientMessage], type[DaemonMessage], str]] = (
    ([Infer("1", RequestDescription(MODEL, (X,)))], InferResponse, "FP32"),
    # This model never serves, so its request stays queued until it is cancelled.
    ([Infer("1", RequestDescription("asleep", (X,))), Cancel("1")], Error, "CANCELLED"),
    ([ServerReady("1")], ReadyResponse, "asleep"),
    ([ModelReady("1", MODEL)], ReadyResponse, "ready=True"),
    ([ServerMetadata("1")], ServerMetadataResponse, MODEL),
    ([ModelMetadata("1", MODEL)], ModelMetadataResponse, "FP32"),
    ([Status("1")], StatusResponse, MODEL),
    ([Metrics("1")], MetricsResponse, MODEL),
    ([Events("1")], EventsResponse, "listens on"),
    ([Logs("1", MODEL)], LogsResponse, "tiny.1."),
    ([Update("1", MODEL, "{other}")], UpdateResponse, "(2,)"),
    ([Rollout("1", "v", PROMOTE, 1)], RolloutResponse, "percent=100.0"),
    ([Reload("1")], ReloadResponse, "changed=()"),
    ([Unload("1", MODEL, wait=True)], LoadResponse, "unloaded"),
    ([Load("1", MODEL, wait=True)], LoadResponse, "serving"),
)


class Use(NamedTuple):
    """A command: arguments after its name, exit status, and words of its output; {names} stand for files."""

    arguments: str
    status: int
    words: str


WEIGHTD = {
    "serve": Use("{none}", 78, "No such file"),
    "run": Use("model.bin", 64, "expected a file that ends in"),
    "check": Use("{config}", 0, "valid; clients connect to"),
    "doctor": Use("--device ascend:99", 69, "not testable"),
    "gateway": Use("--check {none}", 78, "No such file"),
}
WEIGHTCTL = {
    "status": Use("", 75, "tiny: SERVING"),
    "metrics": Use("", 0, 'weightd_ready{model="tiny"} 1'),
    "top": Use("-d 0.2", 0, "MODEL "),
    "models": Use("", 0, "tiny    serving"),
    "metadata": Use("tiny", 0, "predict tiny --random"),
    "health": Use("tiny", 0, "ready"),
    "predict": Use("tiny --input x={row}", 0, "y: FP32 [1, 64]"),
    "events": Use("tiny", 0, "tiny.1: serving"),
    "logs": Use("tiny", 0, ".w1: "),
    "bench": Use("tiny --in-flight 1,8 --seconds 1", 0, "REQUESTS/s"),
    "advise": Use("tiny --rows 8 --seconds 0.5", 0, "equal"),
    "update": Use("tiny {other}", 0, "tiny"),
    "update-weights": Use("tiny {weights}", 1, "cannot update weights on the CPU"),
    "rollout": Use("v 1 --promote", 0, "v@1: 100 %"),
    "reload": Use("", 0, "no model changed"),
    "load": Use("tiny --wait", 0, "tiny: serving"),
    "retry": Use("tiny", 1, "tiny has not failed: it is serving"),
    "restart": Use("tiny --wait", 0, "tiny: serving"),
    "unload": Use("nothing", 1, "no model 'nothing'"),
    "keygen": Use("{none}", 0, ".key: secret key"),
    "install-units": Use("--dry-run --prefix {prefix}", 0, "weightd.service"),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("vocabulary")
    asleep = directory / "python"
    asleep.write_text("#!/bin/sh\nexec sleep 1000\n")
    asleep.chmod(0o700)
    np.save(directory / "row.npy", np.zeros((1, 64), np.float32))
    np.savez(directory / "weights.npz", w=np.zeros((64, 64), np.float32))
    files = {"asleep": asleep, "row": directory / "row.npy", "weights": directory / "weights.npz"}
    files.update(prefix=directory / "prefix", none=directory / "none.toml", config=directory / "weightd.toml")
    files.update(tiny=models.tiny(directory / "tiny.onnx"), other=models.tiny(directory / "other.onnx", seed=1))
    files["config"].write_text(f'[models.tiny]\npath = "{files["tiny"]}"\n')
    return files


@pytest.fixture(scope="module")
def service(names: dict[str, Path]) -> Iterator[Service]:
    tables = {MODEL: {"path": names["tiny"]}, "asleep": {"path": names["tiny"], "python": names["asleep"]}}
    versions: dict[str, object] = {"versions.1": names["tiny"], "load": "manual"}
    with Service({**tables, "v": versions}) as service:
        yield service


def filled(message: ClientMessage, names: dict[str, Path]) -> ClientMessage:
    return Update(message.id, message.model_name, str(names["other"])) if isinstance(message, Update) else message


def test_every_client_message_and_answer(service: Service, names: dict[str, Path]) -> None:
    assert {type(each) for sent, *_ in MESSAGES for each in sent} == {*FROM_CLIENT.values()} - {
        Register,
        Unregister,
        OpenChannel,
    }
    assert {answer for _, answer, _ in MESSAGES} == {*TO_CLIENT.values()} - {Registered, Released, *CHANNEL_MESSAGES}
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as peer:
        peer.connect(unix_path(service.zmq_address))
        stream = Stream(peer, FrameReader(limits.MAX_STATUS_BYTES))
        for sent, kind, words in MESSAGES:
            for message in sent:
                tensors = [ROW] if isinstance(message, Infer) else []
                assert stream.send([*encode(filled(message, names)), *tensors])
            answer = decode(received(stream), TO_CLIENT, max_bytes=limits.MAX_STATUS_BYTES)
            assert isinstance(answer, kind), answer
            assert words in repr(answer)


def received(stream: Stream) -> Sequence[Any]:
    while select.select([stream], [], [], LIMIT_S)[0]:
        for message in stream.receive():
            return message.frames
    raise TimeoutError


def test_zeromq_clients_may_not_operate(service: Service, names: dict[str, Path]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, int(LIMIT_S * 1000))
        peer.connect(service.zmq_address)
        for sent, kind, words in MESSAGES:
            operates = isinstance(sent[0], (Load, Unload, Logs, Update, Rollout, Reload))
            for message in sent:
                tensors = [ROW] if isinstance(message, Infer) else []
                peer.send_multipart([*encode(filled(message, names)), *tensors])
            answer = decode(peer.recv_multipart(), TO_CLIENT, max_bytes=limits.MAX_STATUS_BYTES)
            assert isinstance(answer, Error if operates else kind), answer
            assert ("PERMISSION_DENIED" if operates else words) in repr(answer)


# `test_direct_channels.py` uses these messages and `OpenChannel`.
CHANNEL_MESSAGES = {ChannelOpened, ChannelExtended, ChannelEnded, RequestAdopted, RequestLost}

PROGRAMS = {"weightd": (parser(), WEIGHTD), "weightctl": (ctl_parser(), WEIGHTCTL)}


@pytest.mark.parametrize("program", PROGRAMS)
def test_commands_have_rows(program: str) -> None:
    arguments, uses = PROGRAMS[program]
    assert {command.name for command in read_parser(arguments).commands} == set(uses)


@pytest.mark.parametrize(
    ("program", "verb"), [(program, verb) for program in PROGRAMS for verb in PROGRAMS[program][1]]
)
def test_commands_run_once(program: str, verb: str, service: Service, names: dict[str, Path]) -> None:
    use = PROGRAMS[program][1][verb]
    module = {"weightd": ["weightd_daemon"], "weightctl": ["weightctl", "--socket", service.address]}[program]
    command = [sys.executable, "-m", *module, verb, *use.arguments.format_map(names).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == use.status, done.stdout + done.stderr
    assert use.words in done.stdout + done.stderr


@pytest.mark.parametrize("table", [TO_CHILD, FROM_CHILD], ids=["to child", "from child"])
def test_session_tests_use_every_message_of_children(table: dict[str, type[object]]) -> None:
    # An import alone is not an ast.Name, so it does not count as a use.
    nodes = [node for path in SESSIONS for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert {message.__name__ for message in table.values()} - named <= {"Map", "Unmap"}
