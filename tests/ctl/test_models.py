"""Tests of `weightctl models` and `weightctl metadata`."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
from typing import Any, List, Optional, Sequence

import pytest

from testkit.fakedaemon import FakeDaemon, echo
from weightctl import exit_codes
from weightctl.cli import main
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata, ModelMetadataResponse
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import ModelStatus, Status, StatusResponse
from weightd_protocol.messages.types import ClientMessage

from .conftest import Ctl, fails

IMAGE = TensorSignature("image", "FP32", (-1, 3, -1, -1))
MASK = TensorSignature("mask", "BOOL", (2,))
ANY = TensorSignature("any one", "INT64", None)
Y = TensorSignature("y", "FP32", (-1, 10))


class Models:
    """A daemon with two models: one serves, the other loads."""

    def __init__(self, *inputs: TensorSignature, example: Any = None) -> None:
        self.inputs = inputs
        self.example = example

    def __call__(self, message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        if isinstance(message, Status):
            one, two = (ModelStatus(name, "fake", "/m", state, 0, 0, 0, ()) for name, state in STATES)
            return [encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, (one, two)))]
        if isinstance(message, ModelMetadata):
            assert message.model_name == "one", "unexpected request for a loading model"
            return [encode(ModelMetadataResponse(message.id, "one", "fake", self.inputs, (Y,), example=self.example))]
        return echo(message, tensors)


STATES = (("one", "serving"), ("two", "building"))


def test_models_have_a_row_each(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = Models(IMAGE, MASK, MASK, MASK)
    assert ctl("models").out.splitlines() == [
        "MODEL  STATE     ENGINE  INPUTS",
        "one    serving   fake    image FP32 [-1, 3, -1, -1], mask BOOL [2], mask BOOL [2], and 1 more",
        "two    building  fake    -",
    ]
    daemon.handle = Models(ANY)
    assert json.loads(ctl("models", "--json").out) == {
        "models": [
            {
                "name": "one",
                "state": "serving",
                "platform": "fake",
                "inputs": [{"name": "any one", "datatype": "INT64", "shape": None}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}],
            },
            {"name": "two", "state": "building", "platform": "fake", "inputs": None, "outputs": None},
        ]
    }


def test_model_removed_meanwhile_has_no_inputs(ctl: Ctl, daemon: FakeDaemon) -> None:
    models, gone = Models(), fails("NOT_FOUND", "no model 'one'")
    daemon.handle = lambda message, tensors: (models if isinstance(message, Status) else gone)(message, tensors)
    assert ctl("models").out.splitlines()[1] == "one    serving   fake    -"
    daemon.handle = echo
    assert ctl("models").out == "no models\n"


def test_metadata_as_json(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = Models(IMAGE, example=((1, 3, 64, 64),))
    models = json.loads(ctl("metadata", "one", "--json").out)
    assert models["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, -1, -1]}]
    assert (models["platform"], models["example_shapes"]) == ("fake", {"image": [1, 3, 64, 64]})


def parts(printed: str) -> List[str]:
    """Split the output into description, command and program."""
    head, command, *program = printed.split("\n\n")
    return [head, command, "\n\n".join(program)]


@pytest.mark.parametrize(
    ("inputs", "example", "more"),
    [
        ((IMAGE, MASK), ((1, 3, 64, 64), (2,)), ""),
        ((IMAGE,), None, ""),
        ((ANY,), ((),), ""),
        ((ANY,), None, "--shape 'any one=1'"),
        ((), None, ""),
    ],
)
def test_printed_command_and_program_run(
    ctl: Ctl, daemon: FakeDaemon, inputs: Sequence[TensorSignature], example: Any, more: str
) -> None:
    daemon.handle = Models(*inputs, example=example)
    ran = ctl("metadata", "one")
    _, command, program = parts(ran.out)
    assert command == f"weightctl --socket {daemon.address} predict one --random {more}".rstrip()
    assert main(shlex.split(command)[1:]) == exit_codes.OK
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert all(each.name in printed.getvalue() for each in inputs)


def test_printed_command_names_other_daemon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], daemon: FakeDaemon, directory: Any
) -> None:
    daemon.handle = Models(MASK)
    for variable, option in ((daemon.address, f" --socket {daemon.address}"), (None, "")):
        default(monkeypatch, daemon.address, variable)
        assert main(["--tenant", "a b", "metadata", "one"]) == exit_codes.OK
        head, command, program = parts(capsys.readouterr().out)
        assert head == "one: fake\n  inputs\n    mask  BOOL  [2]\n  outputs\n    y  FP32  [-1, 10]"
        assert command == f"weightctl{option} --tenant 'a b' predict one --random"
        assert ("with Client(tenant='a b') as client:" in program) is (not option)


def default(monkeypatch: pytest.MonkeyPatch, address: str, variable: Optional[str]) -> None:
    if variable is None:
        monkeypatch.delenv("WEIGHTD_SOCKET", raising=False)
        monkeypatch.setattr("weightd.session.default_addresses", lambda: [address])
    else:
        monkeypatch.setenv("WEIGHTD_SOCKET", variable)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTD_SOCKET", raising=False)


def test_escapes_names_of_models(ctl: Ctl, daemon: FakeDaemon) -> None:
    name = "x'\\\n\nweightctl update one /evil\x1b[2J\u202e"
    daemon.handle = Models(TensorSignature(name, "FP32", None))
    lines = [*ctl("models").out.splitlines(), *ctl("metadata", "one").out.splitlines()]
    assert all(each.isprintable() and not each.startswith("weightctl update") for each in lines)
    [command] = [each for each in lines if each.startswith("weightctl ")]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], check=True, capture_output=True).stdout
    assert words.decode().split("\0")[-2] == f"{name}=1"
