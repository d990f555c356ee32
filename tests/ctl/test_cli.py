from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, silent
from weightctl import exit_codes
from weightctl.cli import COMMANDS, main
from weightd_protocol.messages.inference import Infer

from .conftest import Ctl, X, fails, outputs, reports
from .test_status import DIGITS, FAILED, response

# --- status ---------------------------------------------------------------------------------------------------------


def test_status(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = reports(response(DIGITS, FAILED))
    ran = ctl("status")
    assert (ran.status, ran.err) == (exit_codes.ERROR, "")
    assert "cause: bad.1.holder: exited with status 65: no graph" in ran.out
    ran = ctl("status", "digits", "--json")
    read = json.loads(ran.out)
    assert (ran.status, [model["name"] for model in read["models"]]) == (exit_codes.OK, ["digits"])
    ran = ctl("status", "nope")
    assert ran == (exit_codes.ERROR, "", "NOT_FOUND: no model 'nope'; there are: digits, bad\n")


def test_silent_daemon_and_protocol_error(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = silent
    ran = ctl("status", "--timeout", "0.05")
    assert (ran.status, ran.err[:19]) == (exit_codes.UNAVAILABLE, "DEADLINE_EXCEEDED: ")
    daemon.handle = lambda message, _: [[b"\x80"]]
    ran = ctl("predict", "m")
    assert (ran.status, ran.err[:10]) == (exit_codes.PROTOCOL, "PROTOCOL: ")


@pytest.mark.parametrize("verb", [["status"], ["predict", "m"]])
def test_without_a_daemon(alone: Ctl, verb: List[str]) -> None:
    ran = alone(*verb)
    assert (ran.status, ran.out) == (exit_codes.UNAVAILABLE, "")
    assert ran.err.startswith("UNAVAILABLE: no daemon at ")
    assert len(ran.err.splitlines()) == 1
    ran = alone(*verb, "--json")
    assert (ran.status, ran.err) == (exit_codes.UNAVAILABLE, "")
    assert json.loads(ran.out)["error"]["code"] == "UNAVAILABLE"


def test_address_from_environment(
    capsys: pytest.CaptureFixture[str], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTD_SOCKET", daemon.address)
    assert main(["status"]) == exit_codes.OK
    assert "weightd 9.9: running" in capsys.readouterr().out


def test_permission(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("socket.socket.connect", refuse)
    ran = alone("status")
    assert ran.status == exit_codes.NO_PERMISSION
    assert ran.err.startswith("PERMISSION_DENIED: this user may not connect to ")


# --- predict --------------------------------------------------------------------------------------------------------


def test_predict(ctl: Ctl, daemon: FakeDaemon, x: str) -> None:
    ran = ctl("predict", "m", "--input", f"x={x}", "--timeout", "7")
    assert ran == (exit_codes.OK, "x: FP32 [2, 3]\n[[0. 1. 2.]\n [3. 4. 5.]]\n", "")
    message, tensors = daemon.next()
    assert isinstance(message, Infer)
    assert (message.description.model_name, message.parameters.timeout_us) == ("m", 7_000_000)
    assert list(tensors) == [X.tobytes()]


def test_predict_abbreviates_large_outputs(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = outputs(("y", np.zeros((100, 1000), np.float32)))
    ran = ctl("predict", "m")
    assert ran.out.startswith("y: FP32 [100, 1000]\n[[0. 0. 0. ... 0. 0. 0.]\n")
    assert len(ran.out) < 1000


def test_predict_as_json(ctl: Ctl, daemon: FakeDaemon) -> None:
    odd = np.array([1.5, np.nan, np.inf, -np.inf], np.float32)
    daemon.handle = outputs(("y", odd), ("n", np.array([[1], [2]])), ("b", np.array(True)))
    ran = ctl("predict", "m", "--json")

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(ran.out, parse_constant=no_constant) == {
        "model_name": "m",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [4], "data": [1.5, "NaN", "Infinity", "-Infinity"]},
            {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [1, 2]},
            {"name": "b", "datatype": "BOOL", "shape": [], "data": [True]},
        ],
    }


def test_predict_writes_outputs(ctl: Ctl, x: str, tmp_path: Path) -> None:
    there = tmp_path / "new" / "directory"
    command = ["predict", "m", "--input", f"x={x}", "--output"]
    assert ctl(*command, str(there)).out == f"x: FP32 [2, 3] -> {there}/x.npy\n"
    assert np.array_equal(np.load(str(there / "x.npy")), X)
    written = {"name": "x", "datatype": "FP32", "shape": [2, 3], "file": f"{there}/x.npy"}
    assert json.loads(ctl(*command, str(there), "--json").out)["outputs"] == [written]
    ran = ctl(*command, x)
    assert ran.status == exit_codes.CANNOT_WRITE
    assert f"{x}/x.npy: " in ran.err


def test_output_names_stay_in_directory(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.handle = outputs(("../up", X), (".._up", X), ("a/b\x00", X))
    there = tmp_path / "there"
    assert ctl("predict", "m", "--output", str(there)).status == exit_codes.OK
    assert sorted(path.name for path in there.iterdir()) == [".._up.1.npy", ".._up.npy", "a_b_.npy"]
    assert list(tmp_path.iterdir()) == [there]


def test_failed_request(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = fails("INVALID_ARGUMENT", "inputs: x is missing")
    assert ctl("predict", "m") == (exit_codes.ERROR, "", "INVALID_ARGUMENT: inputs: x is missing\n")
    ran = ctl("predict", "m", "--json")
    assert (ran.status, ran.err) == (exit_codes.ERROR, "")
    assert json.loads(ran.out) == {"error": {"code": "INVALID_ARGUMENT", "text": "inputs: x is missing"}}


class Evil:
    def __reduce__(self) -> Any:
        return (os._exit, (99,))


def bad_files(directory: Path) -> Dict[str, str]:
    """Write invalid input files; return the error of each by its name."""
    np.save(str(directory / "objects.npy"), np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez(str(directory / "several.npz"), y=X)
    np.save(str(directory / "good.npy"), X)
    good = (directory / "good.npy").read_bytes()
    damaged = {"short": good[:-1], "header": good[:20], "magic": good[:6], "scrambled": good[:10] + b"(" * len(good)}
    for name, content in {"empty": b"", "text": b"1 2 3\n", "pickle": pickle.dumps(Evil()), **damaged}.items():
        (directory / name).write_bytes(content)
    with (directory / "huge").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (2, 2**59)}
        np.lib.format.write_array_header_1_0(file, header)
    return {
        "missing": "No such file",
        ".": "Is a directory",
        "empty": "an empty file",
        "text": "starts with b'1 2 3",
        "pickle": "a pickle, which weightctl does not load",
        "objects.npy": "Python objects",
        "several.npz": "no array 'x'; there are: y",
        **dict.fromkeys([*damaged, "huge"], "damaged or truncated"),
    }


def test_rejects_invalid_file(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    for name, text in bad_files(tmp_path).items():
        ran = ctl("predict", "m", "--input", f"x={tmp_path}/{name}")
        assert (ran.status, ran.out, ran.err[:18]) == (exit_codes.NO_INPUT, "", "INVALID_ARGUMENT: ")
        assert name in ran.err
        assert text in ran.err
    assert daemon.seen.empty()


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", "required: COMMAND"),
        ("bogus", "invalid choice: 'bogus'"),
        ("predict", "required: MODEL"),
        ("status --timeout 0", "more than 0 and at most 3600 seconds, got '0'"),
        ("status --timeout nan", "got 'nan'"),
        ("status --timeout soon", "got 'soon'"),
        ("status a b", "unrecognized arguments: b"),
        ("status --socket not/an/address", "INVALID_ARGUMENT: expected an address"),
        ("update m", "--rollback"),
        ("update m x.onnx --rollback", "--rollback"),
    ],
)
def test_invalid_command_line(alone: Ctl, arguments: str, text: str) -> None:
    ran = alone(*arguments.split())
    assert (ran.status, ran.out) == (exit_codes.USAGE, "")
    assert text in ran.err


def test_rejects_duplicate_input(alone: Ctl, x: str) -> None:
    ran = alone("predict", "m", "--input", f"x={x}", "--input", f"x={x}")
    assert ran.status == exit_codes.USAGE
    assert "'x' is given twice" in ran.err


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_lists_exit_statuses(alone: Ctl, verb: str) -> None:
    ran = alone(*verb.split(), "--help")
    assert ran.status == exit_codes.OK
    assert "Exit status: 0 " in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.mark.parametrize("verb", ["status", "top", "advise"])
def test_long_help_fits_on_a_screen(alone: Ctl, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = alone(verb, "--help").out.splitlines()
    assert len(lines) <= 30
    assert "See weightctl(1)" in "\n".join(lines)
    assert max(map(len, lines)) <= 80


# --- as a process ---------------------------------------------------------------------------------------------------


# If the tests run in the background of a shell, child processes would ignore Ctrl-C.
_MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from weightctl.cli import main
sys.exit(main())
"""


def start(daemon: FakeDaemon, *arguments: str, stdout: Any = subprocess.PIPE, **more: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    environment.pop("PYTHONUNBUFFERED", None)  # Output that is still buffered at the end is the difficult case.
    command = [sys.executable, "-c", _MAIN, "--socket", daemon.address, *arguments]
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def test_interrupt_ends_quietly(daemon: FakeDaemon) -> None:
    daemon.handle = silent
    with start(daemon, "predict", "m") as process:
        daemon.next()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (exit_codes.INTERRUPTED, b"")
        # Python 3.7 prints an exception that pyzmq swallows; nothing can prevent that.
        assert not err or sys.version_info < (3, 8)


def test_closed_output(daemon: FakeDaemon) -> None:
    read, write = os.pipe()
    os.close(read)
    with start(daemon, "status", stdout=write) as process:
        os.close(write)
        assert process.communicate(timeout=LIMIT_S)[1] == b""
        assert process.returncode == exit_codes.BROKEN_PIPE


def test_full_output(daemon: FakeDaemon) -> None:
    expected = b"weightctl: cannot write the output: No space left on device\n"
    with Path("/dev/full").open("wb") as full, start(daemon, "status", stdout=full) as process:
        assert process.communicate(timeout=LIMIT_S)[1] == expected
        assert process.returncode == exit_codes.CANNOT_WRITE


def test_ascii_terminal(daemon: FakeDaemon) -> None:
    daemon.handle = reports(response(replace(DIGITS, path="/models/zahl-ü.onnx")))
    with start(daemon, "status", PYTHONIOENCODING="ascii") as process:
        assert b"/models/zahl-\\xfc.onnx" in process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == exit_codes.OK
