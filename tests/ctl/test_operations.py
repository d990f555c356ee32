"""Tests of the commands of weightctl that load, unload and update models, `health` and `reload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, Handler, echo, silent
from weightctl import exit_codes
from weightd import Client
from weightd_protocol.codec import encode
from weightd_protocol.errors import ResourceExhausted
from weightd_protocol.messages.control import (
    Load,
    LoadResponse,
    ModelReady,
    ReadyResponse,
    Reload,
    ReloadResponse,
    ServerReady,
    Unload,
    Update,
    UpdateResponse,
)
from weightd_protocol.messages.inference import Error
from weightd_protocol.messages.types import ClientMessage

from .conftest import Ctl, X, fails


def operates(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
    if isinstance(message, ServerReady):
        return [encode(ReadyResponse(message.id, ready=True))]
    if isinstance(message, ModelReady):
        return [encode(ReadyResponse(message.id, ready=False, reason=f"{message.model_name}: attaching"))]
    assert isinstance(message, Reload)
    return [encode(ReloadResponse(message.id, ("a", "b"), ("c",), ()))]


def test_error_has_retry_time(client: Client, daemon: FakeDaemon) -> None:
    for hint, seconds in ((250_000, 0.25), (None, None)):
        daemon.handle = fails("RESOURCE_EXHAUSTED", "full", hint)
        with pytest.raises(ResourceExhausted) as caught:
            client.infer("m", {"x": X})
        assert caught.value.retry_after == seconds


# --- update -----------------------------------------------------------------------------------------------------------


def updates(path: str, weights: str = "") -> Handler:
    return lambda message, _: [encode(UpdateResponse(message.id, "m", (3,), path, weights, "/models/m.onnx"))]


def test_update_reports_serving_and_configured_file(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    new = tmp_path / "new.onnx"
    new.touch()
    daemon.handle = updates(str(new))
    back = "  the configuration still names /models/m.onnx, which is loaded after a reboot\n"
    assert ctl("update", "m", str(new)) == (exit_codes.OK, f"m: generation 3 now serving, {new}\n{back}", "")
    daemon.handle = updates("/models/m.onnx")
    assert ctl("update", "m", "--rollback") == (exit_codes.OK, "m: generation 3 now serving, /models/m.onnx\n", "")
    expected = {"model_name": "m", "generations": [3], "weights": ""}
    expected.update(path="/models/m.onnx", configured_path="/models/m.onnx")
    assert json.loads(ctl("--json", "update", "m", "--rollback").out) == expected
    np.savez(str(tmp_path / "w.npz"), w=X)
    daemon.handle = updates("/models/m.onnx", "/w.npz")
    text = f"m: generation 3 now serving, /models/m.onnx with /w.npz\n{back}"
    assert ctl("update-weights", "m", str(tmp_path / "w.npz")).out == text


@pytest.mark.parametrize("content", [b"", b"\x08\x07\x12\x04onnx", b"\x93NUMPY", b"\x80\x04."])
def test_does_not_send_weights_other_than_npz(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "new.onnx"
    file.write_bytes(content)
    ran = ctl("update-weights", "m", str(file))
    assert (ran.status, ran.out) == (exit_codes.NO_INPUT, "")
    assert f"{file}: expected an .npz file of numpy.savez" in ran.err
    assert daemon.seen.empty()


@pytest.mark.parametrize("verb", ["update", "update-weights"])
def test_missing_file_sends_no_request(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path, verb: str) -> None:
    daemon.handle = updates("/models/m.onnx")
    ran = ctl(verb, "m", str(tmp_path))
    assert (ran.status, ran.out) == (exit_codes.NO_INPUT, "")
    assert str(tmp_path) in ran.err
    assert daemon.seen.empty()


def test_first_rank_file_must_exist(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    path = str(tmp_path / "rank{rank}.onnx")
    daemon.handle = updates(path)
    ran = ctl("update", "m", path)
    assert ran.err.endswith(f"{tmp_path}/rank0.onnx: no such file\n")
    (tmp_path / "rank0.onnx").touch()
    assert ctl("update", "m", path).status == exit_codes.OK


def test_slow_update_and_silent_daemon(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, tensors: [] if isinstance(message, Update) else echo(message, tensors)
    ran = ctl("--timeout", "0.3", "update", "m", "--rollback")
    text = "m: update not complete after 0.3 s and continues; see `weightctl status m`"
    assert ran == (exit_codes.NOT_YET, "", f"DEADLINE_EXCEEDED: {text}\n")
    daemon.handle = silent
    ran = ctl("--timeout", "0.3", "update", "m", "--rollback")
    assert ran.status == exit_codes.UNAVAILABLE
    assert "the daemon does not respond" in ran.err


# --- load, unload, retry and restart ----------------------------------------------------------------------------------


def loads(message: ClientMessage, _: Sequence[bytes]) -> List[List[Any]]:
    """Load and unload any model except "slow", which gets no response, and "bad", which fails."""
    if not isinstance(message, (Load, Unload)):
        return list(echo(message, ()))
    if message.model_name == "slow":
        return []
    if message.model_name == "bad":
        return [encode(Error(message.id, "FAILED_PRECONDITION", "bad: no such file"))]
    done = "unloaded" if isinstance(message, Unload) else message.action
    return [encode(LoadResponse(message.id, message.model_name, done))]


@pytest.mark.parametrize("command", ["load", "retry", "restart", "unload"])
def test_load_commands_print_the_state(ctl: Ctl, daemon: FakeDaemon, command: str) -> None:
    daemon.handle = loads
    state = "unloaded" if command == "unload" else command
    assert ctl(command, "a", "b") == (exit_codes.OK, f"a: {state}\nb: {state}\n", "")
    assert json.loads(ctl("--json", command, "a").out) == {"a": {"state": state}}


def test_load_commands_continue_after_an_error(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = loads
    late = "slow: load not complete after 0.3 s and continues; see `weightctl status slow`"
    assert ctl("--timeout", "0.3", "load", "slow") == (exit_codes.NOT_YET, "", f"DEADLINE_EXCEEDED: {late}\n")
    assert ctl("--timeout", "0.3", "load", "slow", "a") == (exit_codes.NOT_YET, f"{late}\na: load\n", "")
    ran = ctl("--timeout", "0.3", "load", "bad", "slow")
    assert ran == (exit_codes.ERROR, f"bad: no such file\n{late}\n", "")
    assert ctl("load", "bad").err == "FAILED_PRECONDITION: bad: no such file\n"


# --- health and reload ------------------------------------------------------------------------------------------------


def test_health(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = operates
    assert ctl("health") == (exit_codes.OK, "ready\n", "")
    assert ctl("health", "m") == (exit_codes.NOT_YET, "not ready: m: attaching\n", "")
    ran = ctl("--json", "health", "m")
    assert json.loads(ran.out) == {"model_name": "m", "ready": False, "reason": "m: attaching"}
    assert ran.status == exit_codes.NOT_YET
    daemon.handle = silent
    assert ctl("--timeout", "0.2", "health").status == exit_codes.UNAVAILABLE
    daemon.handle = fails("NOT_FOUND", "no model 'm'")
    assert ctl("health", "m") == (exit_codes.ERROR, "", "NOT_FOUND: no model 'm'\n")


def test_reload(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = operates
    assert ctl("reload") == (exit_codes.OK, "added: a, b\nchanged: c\n", "")
    assert json.loads(ctl("--json", "reload").out) == {
        "added": ["a", "b"],
        "changed": ["c"],
        "removed": [],
        "retried": [],
    }
    daemon.handle = lambda message, _: [encode(ReloadResponse(message.id, (), (), ()))]
    assert ctl("reload").out == "configuration in force; no model changed\n"
    daemon.handle = fails("INVALID_ARGUMENT", "weightd.toml: not TOML")
    assert ctl("reload") == (exit_codes.ERROR, "", "INVALID_ARGUMENT: weightd.toml: not TOML\n")


@pytest.mark.parametrize("command", ["reload", "update m --rollback"])
def test_zeromq_operation_error_has_a_hint(ctl: Ctl, daemon: FakeDaemon, command: str) -> None:
    daemon.handle = fails("PERMISSION_DENIED", "may not")
    hint = "this connection uses ZeroMQ; use --socket unix:///PATH for the Unix socket"
    assert ctl(*command.split()) == (exit_codes.ERROR, "", f"PERMISSION_DENIED: may not; {hint}\n")
